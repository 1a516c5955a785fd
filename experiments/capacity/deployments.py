# SPDX-License-Identifier: Apache-2.0
"""The deployments that are compared.

Every parallelism and number of instances of given lists that fits the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from experiments.serve import ServeOptions, check_fits, job, specs
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.models.parallel import Parallel
from pdsim.serving.workload import Request

__all__ = ["Shape", "configured", "feasible"]


@dataclass(frozen=True, order=True)
class Shape:
    """A parallelism and a P:D ratio.

    The order is that of the fields, so the smallest parallelism comes first.
    """

    prefill_tp: int
    decode_tp: int
    prefill: int  # instances
    decode: int

    @property
    def gpus(self) -> int:
        """GPUs of one copy."""
        return self.prefill_tp * self.prefill + self.decode_tp * self.decode

    def __str__(self) -> str:
        return f"{self.prefill}P tp{self.prefill_tp} : {self.decode}D tp{self.decode_tp}"


def configured(config: Config, shape: Shape) -> Config:
    """Return *config* with the parallelism of *shape*; pipeline, context and data parallelism stay.

    Between sides of different tensor parallelism KV that is pushed goes through staging buffers: slice by slice it
    would take longer than its prefill.
    """
    prefill, decode = config.parallel.prefill, config.parallel.decode
    parallel = Parallel(
        prefill=replace(prefill, tp=shape.prefill_tp, instances=shape.prefill),
        decode=replace(decode, tp=shape.decode_tp, instances=shape.decode),
    )
    staging = config.kv.staging or (
        shape.prefill_tp != shape.decode_tp and config.model.attention != "mla" and config.engine.handoff == "push"
    )
    return replace(config, parallel=parallel, kv=replace(config.kv, staging=staging))


def feasible(
    config: Config,
    prefill_tp: Sequence[int],
    decode_tp: Sequence[int],
    instances: Sequence[int],
    requests: Sequence[Request],
) -> tuple[list[Shape], dict[Shape, str]]:
    """Return the shapes that can serve *requests*, sorted, and why the others cannot.

    Nothing is simulated: what is checked is that ranks have places, the model can be divided, and each request fits.
    """
    fitting, refused = [], {}
    for parts in product(prefill_tp, decode_tp, instances, instances):
        shape = Shape(*parts)
        own = configured(config, shape)
        try:
            what = job(own, ServeOptions())
            check_fits(what, requests)
            specs(own, what, requests[:1])  # finds a place for each rank
        except (ConfigError, ValueError) as error:
            refused[shape] = str(error)
        else:
            fitting.append(shape)
    return sorted(fitting), refused
