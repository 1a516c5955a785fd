# SPDX-License-Identifier: Apache-2.0
"""The report of a run: its `figures`, its content (`run_report`), and the `page`."""
