"""What the numbers of a run rest on: the source of every parameter, and the weakest kind among them.

A modelled number is no better than its parameters; a measured one is evidence itself, except where it emulates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pdsim.calibration.definition import Calibration
from pdsim.config import Config
from pdsim.hardware import EVIDENCE

__all__ = ["Evidence", "gather"]


@dataclass(frozen=True)
class Evidence:
    """*sources* maps a parameter, such as ``hw.gpu.memory_rate``, to ``"kind: text"``."""

    sources: Mapping[str, str]
    calibration: Calibration | None = None  # of the engine, if the run is modelled and has one

    @property
    def weakest(self) -> str:
        """The weakest kind of `EVIDENCE`, or ``"none"`` if nothing says where a number comes from."""
        return max(self.kinds, key=EVIDENCE.index) if self.sources else "none"

    @property
    def kinds(self) -> dict[str, list[str]]:
        """The parameters of each kind, from the strongest kind to the weakest."""
        kinds: dict[str, list[str]] = {kind: [] for kind in EVIDENCE}
        for parameter, source in self.sources.items():
            kinds[kind_of(parameter, source)].append(parameter)
        return {kind: parameters for kind, parameters in kinds.items() if parameters}

    def texts(self, kind: str) -> dict[str, list[str]]:
        """Return the parameters of *kind* by what their source says, in order."""
        texts: dict[str, list[str]] = {}
        for parameter in self.kinds.get(kind, ()):
            texts.setdefault(self.sources[parameter].partition(":")[2].strip(), []).append(parameter)
        return texts

    def as_dict(self) -> dict[str, Any]:
        """Return what `run.json` keeps."""
        found = {"weakest": self.weakest, "sources": dict(self.sources)}
        return found | ({"calibration": asdict(self.calibration)} if self.calibration else {})


def kind_of(parameter: str, source: str) -> str:
    """Return the kind in *source*.  Raise a `ValueError` that names *parameter* if it begins with none."""
    kind = source.partition(":")[0].strip()
    if kind not in EVIDENCE:
        raise ValueError(f"{parameter}: source {source!r} must begin with one of {', '.join(EVIDENCE)} and a colon")
    return kind


def gather(config: Config, *, serving: bool, gathering: bool = False) -> Evidence:
    """Return the evidence behind a run of *config*.

    *serving* says whether it computed forwards of a language model, *gathering* whether it ran collectives.

    Nothing is returned for a model whose machine or engine has no sources at all: its numbers must not be printed.
    """
    sources: dict[str, str] = {}
    if config.target == "model":
        if not config.hw.sources or not config.backend.sources:
            return Evidence({})
        sources |= _named("hw", config.hw.sources) | _named("backend", config.backend.sources)
    elif config.hw.guest:
        sources["transfers"] = (
            "assumed: timed on emulated processors, which says that bytes arrive and nothing of speed"
        )
    else:
        sources["transfers"] = "measured: by this run, on the host and with the engine that run.json names"
    if gathering and config.target == "model" and config.collective is not None:
        sources |= _named("collective", config.collective.sources)
    if serving:
        sources |= _named("model", config.model.sources)
        sources["compute"] = "assumed: a roofline with the shares and constants of the compute settings"
    return Evidence(sources, config.calibration if config.target == "model" else None)


def _named(owner: str, sources: Mapping[str, str]) -> dict[str, str]:
    """Return *sources* with full names; one text may stand for several, as in ``"nodes, gpus"``."""
    return {f"{owner}.{name.strip()}": text for names, text in sources.items() for name in names.split(",")}
