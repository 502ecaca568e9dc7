"""The three stages of a run. No stage imports another; they meet through artifacts."""
