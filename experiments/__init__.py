"""What is run and what is measured: one file each."""
