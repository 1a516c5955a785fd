# SPDX-License-Identifier: Apache-2.0
"""Figures, described once and drawn twice.

`figure` describes them, `interactive` draws them by plotly in a page, and `static` by matplotlib in
a file.

Whoever has something to show builds a `Figure` of plain numbers in SI units and knows nothing of either library.
"""
