"""The configuration groups, as a package, so that Hydra's ``pkg://conf`` finds them wherever pdsim is installed.

Hydra imports it, and with that `config.yaml` has its ``_defaults``: every key that there is, with its default.
"""

from hydra.core.config_store import ConfigStore

from pdsim.config import defaults

ConfigStore.instance().store(name="_defaults", node=defaults())
