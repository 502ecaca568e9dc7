"""Everything of a running stage on disk, so that the stage can go on from there."""
