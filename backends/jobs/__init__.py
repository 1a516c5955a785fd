"""Jobs on real engines: one process per rank, watched by a launcher."""
