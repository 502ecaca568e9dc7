"""Measurements for `rlhf bench`: what a machine can do, and how near the product comes to it."""
