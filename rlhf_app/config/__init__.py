"""Settings of a run: schema, presets, merging and error messages. Free of torch."""
