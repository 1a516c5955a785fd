# SPDX-License-Identifier: Apache-2.0
"""The report of a run: figures of its requests (`requests`), of its transfers and links (`movement`), and the page.

What is a figure is `pdsim.results.drawing`; sweeps and validations have figures of their own, in their rooms.
"""
