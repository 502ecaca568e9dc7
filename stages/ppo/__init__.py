"""Stage 3: PPO against the reward model."""
