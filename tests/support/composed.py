"""The configuration that overrides compose, without the checks of the command line."""

from __future__ import annotations

from functools import cache

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from pdsim.config import Config, load

__all__ = ["composed"]


@cache
def composed(*words: str) -> Config:
    """Return the configuration that *words* choose."""
    with initialize_config_module("conf", version_base="1.3"):
        values = OmegaConf.to_container(compose("config", list(words)), resolve=True)
    return load(values)
