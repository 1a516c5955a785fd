"""Ranks of real engines that are killed in mid-transfer, however quick or slow the machine is."""

import itertools
import os
import pkgutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pdsim.transfer import Program, Transfer
from pdsim.transfer.job import Rank, RankSpec

KILLED = "killed by signal 9"
"""What the outcome of such a rank says."""


def dying(specs: Sequence[RankSpec], rank: str, operation: str, after: int) -> list[RankSpec]:
    """Return *specs*, with *rank* killed once it has posted its *after*-th *operation*, ``read`` or ``write``."""
    return [
        replace(
            spec,
            program=f"{__name__}:program",
            arguments={"of": spec.program, "operation": operation, "after": after, "arguments": spec.arguments},
        )
        if spec.name == rank
        else spec
        for spec in specs
    ]


def program(rank: Rank, *, of: str, operation: str, after: int, arguments: dict[str, Any]) -> Program:
    """Run the program *of* a rank until its process is killed."""
    post, count = getattr(rank.endpoint, operation), itertools.count(1)

    def posted(*what: Any, **how: Any) -> Transfer:
        transfer: Transfer = post(*what, **how)
        if next(count) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return transfer

    setattr(rank.endpoint, operation, posted)
    return (yield from pkgutil.resolve_name(of)(rank, **arguments))
