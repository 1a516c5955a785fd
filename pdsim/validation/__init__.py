# SPDX-License-Identifier: Apache-2.0
"""Predictions compared with measurements: values in, errors and verdicts out.

Nothing here runs an experiment or knows one by name; `experiments.validate` (transfers, handoffs, collectives and
serving on a real engine) and `experiments.validate_live` (servers) choose the points, predict and measure.
"""
