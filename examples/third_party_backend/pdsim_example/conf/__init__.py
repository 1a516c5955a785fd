"""Configuration groups of this package, beside those of pdsim."""
