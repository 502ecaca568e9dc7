"""The commands of `rlhf`; importing one does not import torch."""
