"""The test oracle of the protocol: invariants, ownership of memory, leaks.  Imported by tests and trials only."""
