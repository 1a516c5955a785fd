"""Mooncake in the RDMA guest: as it is installed."""

from backends.emulation.guest.recipe import Installed

__all__ = ["RECIPE"]

RECIPE = Installed("mooncake", "mooncake.engine")
