# SPDX-License-Identifier: Apache-2.0
"""Experts spread over ranks: what a rank's tokens send to experts elsewhere, and how long that takes.

With expert parallelism each rank of an engine holds whole experts.  In every layer that has experts a rank
dispatches its tokens to the ranks whose experts they are routed to, and combines what comes back.  Two ways of it
are modelled, those of DeepEP (https://github.com/deepseek-ai/DeepEP):

* *by node*, as prefill does: a token crosses the network once for each other node with an expert of it, and is
  passed on there over the interconnect to each rank that has one;
* *direct*, as decode does: a token goes to each of its experts by itself, over the network to those on other nodes.

Routing is taken to be even and independent.  Dispatched tokens are of one byte an element with a scale of four bytes
for 128 of them where weights are of 8 bits, and of the type of the weights otherwise; what is combined has two
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdsim.compute.options import Compute
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import Machine
from pdsim.models.llm import Llm

__all__ = ["Exchange", "exchange", "expert_parameters"]

SCALES = 4 / 128
"""Bytes of scales for each byte of an FP8 activation (DeepSeek-V3, arXiv 2412.19437, section 3.3: tiles of 128)."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the experts of other ranks add to a forward; without values, nothing.

    >>> Exchange(network=1e6, port=2e6, network_rate=1e9, port_rate=1e10, latency=1e-3).seconds(10)
    0.011
    """

    network: float = 0.0  # bytes that a token sends through its rank's card, in all layers; as many come in
    port: float = 0.0  # the same through its rank's port of the interconnect
    network_rate: float = 1.0  # bytes/s
    port_rate: float = 1.0  # bytes/s
    latency: float = 0.0  # seconds an iteration, of all its dispatches and combines
    overlap: bool = False  # two halves of a batch take turns: one computes while the tokens of the other travel

    def __bool__(self) -> bool:
        """Return whether tokens travel at all."""
        return bool(self.network or self.port)

    def seconds(self, tokens: float) -> float:
        """Return how long those of *tokens* of a rank take when nothing else uses the links."""
        if not (self.network or self.port):
            return 0.0
        return max(tokens * self.network / self.network_rate, tokens * self.port / self.port_rate) + self.latency


def expert_parameters(model: Llm) -> float:
    """Return how many of the parameters of *model* are routed experts'.

    Of E experts a token uses k, and all the rest: ``parameters - active`` are those of E - k experts of each layer.
    """
    if not model.experts:
        return 0.0
    return (model.parameters - model.active) * model.experts / (model.experts - model.experts_per_token)


def exchange(model: Llm, machine: Machine, compute: Compute, ranks: int, groups: int, direct: bool) -> Exchange:
    """Return what *model* exchanges on *machine* with its experts spread over *ranks*, in *groups* attention groups.

    The ranks of a group divide its tokens among them.  Raise a `ConfigError` for a model without experts, more ranks
    than experts, and for GPUs or nodes that nothing joins.
    """
    key = f"parallel.{'decode' if direct else 'prefill'}.ep={ranks}"
    if not model.experts:
        raise ConfigError(f"{key} spreads experts, and model={model.name} has none; leave ep at 1")
    if ranks > model.experts:
        raise ConfigError(f"{key} is more than the {model.experts} experts of a layer; lower tp and ep")
    near = min(ranks, machine.gpus)
    nodes = -(-ranks // near) if near else ranks
    if nodes > 1 and not machine.nic.count:
        raise ConfigError(f"{key} needs {nodes} nodes, and hw={machine.name} has no cards between them")
    if near > 1 and machine.interconnect.kind != "switch":
        raise ConfigError(
            f"{key}: experts are modelled over a switch between GPUs, and hw={machine.name} has "
            f"interconnect.kind={machine.interconnect.kind}; leave ep at 1"
        )
    chosen = model.experts_per_token
    if direct:
        network, port = chosen * (1 - near / ranks), chosen * (near - 1) / ranks
    else:
        network = nodes_hit(model, nodes) * (nodes - 1) / nodes if nodes > 1 else 0.0
        port = ranks * (1 - (1 - 1 / ranks) ** chosen) * (near - 1) / near
    width = model.hidden * ((1 + SCALES) if model.dtype_bytes == 1 else model.dtype_bytes) + 2 * model.hidden
    layers, share = model.layers - model.dense_layers, groups / ranks
    return Exchange(
        network=layers * share * network * width,
        port=layers * share * port * width,
        network_rate=machine.nic.rate * machine.nic.count / machine.gpus * compute.exchange_share
        if nodes > 1
        else 1.0,
        port_rate=machine.interconnect.rate if near > 1 else 1.0,
        latency=2 * layers * compute.exchange_latency,
        overlap=compute.exchange_overlap,
    )


def nodes_hit(model: Llm, nodes: int) -> float:
    """Return on how many of *nodes*, in the mean, a token has an expert.

    A router that is limited to g of G groups of experts (DeepSeek-V3: 4 of 8) chooses those first.  A node that
    holds whole groups is missed if none of them is chosen; one of several that share a group, if its group is not
    chosen or has none of the token's experts there.
    """
    total, limit, chosen = model.expert_groups, model.groups_per_token, model.experts_per_token
    if not total:
        return float(nodes * (1 - (1 - 1 / nodes) ** chosen))
    if nodes <= total:
        return float(nodes * (1 - (1 - limit / total) ** (total / nodes)))
    return float(nodes * (limit / total) * (1 - (1 - total / nodes) ** (chosen / limit)))
