"""What a run leaves behind: records, files, tables."""
