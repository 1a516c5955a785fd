# SPDX-License-Identifier: Apache-2.0
"""The parts of a validation of serving, and what the model says of them, one after the other in one deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.serve import ServeOptions, check_fits, job, result, specs
from pdsim.config import Config
from pdsim.core.progress import ShowProgress
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from pdsim.validation.load_errors import SINGLE

__all__ = ["APART", "REST", "WARMUP", "Parts", "in_turn", "predicted", "single_requests"]

Parts = Mapping[str, Sequence[Request]]
"""Requests by the name of their part, each part from time 0 on."""

REST = 20.0
"""Seconds between the last arrival of a part and the next part: nothing of one is under way in the other."""

WARMUP = "warmup-"
"""How the names of parts begin that are not judged, but leave their traces: pages in another order."""

APART = 5.0
"""Seconds between two single requests: none finds another under way."""


def single_requests(lengths: Sequence[int], output: int, repeat: int, context: int) -> dict[str, list[Request]]:
    """Return parts of *repeat* single requests of each of *lengths* that fits, and one before each as a warm-up."""
    found: dict[str, list[Request]] = {}
    for length in (length for length in lengths if length + output <= context):
        found[f"{WARMUP}{length}"] = [Request(0.0, length, output, None)]
        found[f"{SINGLE}{length}"] = [Request(APART * number, length, output, None) for number in range(repeat)]
    return found


def in_turn(parts: Parts) -> list[Request]:
    """Return the requests of all *parts*, those of each `REST` after the last of the one before."""
    found: list[Request] = []
    start = 0.0
    for requests in parts.values():
        found += [Request(start + one.arrival, *one[1:]) for one in requests]
        start += requests[-1].arrival + REST if requests else 0.0
    return found


def predicted(
    config: Config, parts: Parts, progress: ShowProgress = lambda *_: None
) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each of *parts* on the model of *config*, that serves one after the other.

    They are not runs of their own: what one leaves, as pages in the order in which it freed them, the next one
    finds.
    """
    requests = in_turn(parts)
    what = job(config, ServeOptions())
    check_fits(what, requests)
    target = Model(config.hw, config.backend, memory=config.memory, seed=config.seed, collective=config.collective)
    progress(0.0, f"predicting {len(requests)} requests")
    columns = result(config, what, requests, target.run(specs(config, what, requests))).requests
    rows = [{name: values[number] for name, values in columns.items()} for number in range(len(requests))]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, own in parts.items():
        found[name], rows = rows[: len(own)], rows[len(own) :]
    return found
