"""The staged path: gather into a staging buffer, one write, scatter."""
