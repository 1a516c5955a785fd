"""Many runs as one: points, their collection into one table."""
