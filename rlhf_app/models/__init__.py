"""Models: loading, chat formats, heads, shapes. Importing the package imports no torch."""
