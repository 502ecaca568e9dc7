"""What a run prints and leaves behind: plan, summary.json and the final table."""
