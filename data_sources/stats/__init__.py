"""What data holds, in numbers: lengths, duplicates, scripts, and how answers differ."""
