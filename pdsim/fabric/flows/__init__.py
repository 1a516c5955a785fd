"""Max-min fair sharing of links by flows; what is private stays inside this package."""
