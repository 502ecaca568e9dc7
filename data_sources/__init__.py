"""Raw rows to canonical records, blended and split without leaks, and to token ids."""
