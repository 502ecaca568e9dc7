"""The shared library of the `rlhf` application. Importing it does not import torch."""

__version__ = "0.1.0"
