"""Stage 2: the reward model."""
