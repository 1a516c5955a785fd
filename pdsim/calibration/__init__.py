# SPDX-License-Identifier: Apache-2.0
"""Calibrations: the model's parameters, fitted to measurements, with their intervals and errors.

`samples` and `importers` have the measurements, `calibrate` and `transfers` the fit over the one `robust` solver;
``conf/calibration/NAME.yaml`` is a `definition.Calibration`.  `kernels` fits what forwards are made of, `compaction`
thins published tables of operators.
"""
