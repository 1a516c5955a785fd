# SPDX-License-Identifier: Apache-2.0
"""Predictions compared with measurements: values in, errors and verdicts out.

`intervals` says how far the uncertainty of a calibration moves a prediction, `sealed` keeps predictions and
measurements so that neither can be changed, `verdicts` compares values of the same points and judges them by bounds,
`loads` does so for quantiles of whole loads, and `agreement` makes the figures and the page of a report.

Nothing here runs an experiment or knows one by name.  What does is `experiments.validate` (transfers, handoffs,
collectives and serving on a real engine) and `experiments.validate_live` (servers): they choose the points, predict
and measure.
"""
