# SPDX-License-Identifier: Apache-2.0
"""How far a run is: what experiments say of their steps, and what jobs say within one.

An experiment calls its `ShowProgress` when a step begins; between two such calls the target calls the `Meter` with
what the ranks have counted (`pdsim.transfer.job.Rank.counts`).  Knows neither terminals nor experiments.
"""

from __future__ import annotations

from typing import Protocol

from pdsim.core.units import format_time

__all__ = ["Meter", "ShowProgress", "silent", "within"]


class ShowProgress(Protocol):
    """What an experiment calls when a step begins."""

    def __call__(self, share: float, text: str = "", until: float | None = None, /) -> None:
        """Show that *share* of the run, 0 to 1, is done and that the step called *text* begins.

        *until* is the share when that step has ended, if it is one job: what its ranks count then moves the bar.
        """


def silent(_share: float, _text: str = "", _until: float | None = None, /) -> None:
    """Show nothing."""


def within(show: ShowProgress, begin: float, end: float, text: str = "") -> ShowProgress:
    """Return what a part of the run calls: 0 to 1 of it is *begin* to *end* of the whole, and *text* comes first."""

    def shown(share: float, own: str = "", until: float | None = None) -> None:
        upper = None if until is None else begin + (end - begin) * until
        show(begin + (end - begin) * share, f"{text} {own}".strip(), upper)

    return shown


class Meter:
    """Shows how far the experiment says it is, and between two such words what the ranks of its job count.

    Called by the experiment as a `ShowProgress`, by a model through `simulated`, by real processes through
    `measured`. With nobody to *show* it to it does nothing.
    """

    def __init__(self, show: ShowProgress | None) -> None:
        self._show = show
        self._share = self._until = 0.0
        self._text = ""

    def __call__(self, share: float, text: str = "", until: float | None = None) -> None:
        """Show that a step begins."""
        self._share, self._text = share, text
        self._until = share if until is None else until
        if self._show is not None:
            self._show(share, text)

    def simulated(self, now: float, done: int, of: int) -> None:
        """Show the virtual time *now*, and that *done* of *of* pieces of work are done; 0 of 0 is unknown."""
        self._within(done, of, f" ({format_time(now)} simulated)")

    def measured(self, now: float, done: int, of: int) -> None:  # noqa: ARG002  both targets call it alike
        """Show that *done* of *of* pieces of the job's work are done."""
        self._within(done, of, "")

    def _within(self, done: int, of: int, more: str) -> None:
        if self._show is None:
            return
        share, count = (done / of, f", {done} of {of}") if of else (0.0, "")
        self._show(self._share + (self._until - self._share) * share, f"{self._text}{count}{more}")
