# SPDX-License-Identifier: Apache-2.0
"""The report of a run: its `figures`, and the `page` with its content."""
