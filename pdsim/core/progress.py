# SPDX-License-Identifier: Apache-2.0
"""How far a run is: what experiments say of their steps."""

from typing import Protocol


class ShowProgress(Protocol):
    """What an experiment calls when a step begins."""

    def __call__(self, share: float, text: str = "", until: float | None = None, /) -> None:
        """Show that *share* of the run, 0 to 1, is done and that the step called *text* begins.

        *until* is the share when that step has ended, if it is one job: what its ranks count then moves the bar.
        """


def silent(_share: float, _text: str = "", _until: float | None = None, /) -> None:
    """Show nothing."""


def within(show: ShowProgress, begin: float, end: float, text: str = "") -> ShowProgress:
    """Return the `ShowProgress` of a part of the run, from *begin* to *end* of the whole; *text* comes first."""

    def shown(share: float, own: str = "", until: float | None = None) -> None:
        upper = None if until is None else begin + (end - begin) * until
        show(begin + (end - begin) * share, f"{text} {own}".strip(), upper)

    return shown
