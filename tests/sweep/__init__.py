"""Sweeps: their points, who runs them, what they leave behind."""
