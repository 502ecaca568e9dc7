"""Where rewards come from: one file for each kind of source, and their sum."""
