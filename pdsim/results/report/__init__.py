# SPDX-License-Identifier: Apache-2.0
"""The report of a run: its `figures`, what it says (`run_report`), and the `page`."""
