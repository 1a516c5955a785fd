"""A transfer engine of another package."""
