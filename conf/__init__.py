"""The configuration groups, as a package so that Hydra finds them wherever pdsim is installed."""
