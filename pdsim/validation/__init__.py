# SPDX-License-Identifier: Apache-2.0
"""Predictions compared with measurements: values in, errors and verdicts out.

`verdicts` compares values of the same points and judges them by bounds, `load_errors` does so for quantiles of whole
loads, `intervals` says how far the uncertainty of a calibration moves a prediction, and `agreement` makes the
figures and the page of a report.

Nothing here runs an experiment or knows one by name.  What does, and writes the files that are read here, are
`experiments.validate` (transfers, handoffs and serving on a real engine) and `experiments.validate_live` (servers):
they choose the points, predict, seal the predictions before anything is measured, and measure.
"""
