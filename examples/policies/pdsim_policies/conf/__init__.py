"""The configuration groups of this package."""
