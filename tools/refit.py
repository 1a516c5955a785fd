# SPDX-License-Identifier: Apache-2.0
"""`pdsim refit`: fit shipped numbers again, from the samples that they name, and print their errors.

The fits are those of `pdsim.calibration` and of `tools`; this composes the configurations that they start from,
and prints.  It is how a reader checks a number of ``conf/``: the sample files in ``data/`` are the
evidence, and the same code that made the number makes it again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdsim.calibration import samples
from pdsim.calibration.calibrate import Fitted, fitted, table
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError, instead
from pdsim.core.files import data
from pdsim.core.plugins import conf
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from tools import collective_fit, handoff_fit, option_fit


def refit(words: Sequence[str]) -> int:
    """Fit again what the first of *words* names, one of `WHAT`, print the result and return the exit status.

    Without words it is ``published``; after that, names choose among the calibrations. Nothing is written: what a
    fit says is compared with the file by whoever reads the table. Samples are in ``data/``, so a checkout of the
    repository is needed.

    Raise a `ConfigError` for anything else, and for names after it that are no published calibration.
    """
    what, *names = words or ("published",)
    if what not in WHAT or (names and what != "published"):
        wrong = what if what not in WHAT else names[0]
        raise ConfigError(f"refit {wrong} is not known; {instead(wrong, WHAT)}")
    for one in WHAT[what](names):
        show_table(one)
    return 0


def published(names: Sequence[str] = ()) -> list[Fitted]:
    """Return each published calibration of `conf`, or those called *names*, fitted again from its own samples.

    Raise a `ConfigError` for a name that is no such calibration.
    """
    known = {name: file for name, file in _files("*").items() if file.get("kind") == "published"}
    for name in names:
        if name not in known:
            raise ConfigError(f"refit published {name}: not a published calibration; {instead(name, known)}")
    return [_again(known[name]) for name in names or known]


def bare() -> list[Fitted]:
    """Return the calibrations of bare libraries, without pdsim around them, fitted again from their pairs."""
    return [_again(file) for file in _files("*_bare-*").values()]


def _files(pattern: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return {path.stem: OmegaConf.load(path) for path in sorted((conf() / "calibration").glob(f"{pattern}.yaml"))}


def _again(file: Any) -> Fitted:
    # Engine and machine are the first that the file holds for; the path is that of the first parameter with an
    # interval (``backend.PATH.name``); a name with "-read" is of reads.
    at = next(iter(file.intervals)).split(".")[1]
    operation = "read" if "-read" in file.name else "write"
    words = [f"hw={file.hw[0]}", f"backend={file.backend[0]}", f"experiment.operation={operation}"]
    config = compose([*words, "experiment=transfer", "calibration=none"])
    rows = samples.read(data("calibration", f"{file.name}.csv"))
    return fitted(rows, config.hw, config.backend, operation, at, file.name, "again")


WHAT: Mapping[str, Callable[[Sequence[str]], list[Table]]] = {
    "published": lambda names: [table(published(names))],
    "bare": lambda _: [table(bare())],
    "options": lambda _: option_fit.tables(),
    "collectives": lambda _: collective_fit.tables(),
    "handoffs": lambda _: handoff_fit.tables(),
}
"""What can be fitted again: calibrations, costs of options, `conf/collective`, the hosts' part of handoffs."""
