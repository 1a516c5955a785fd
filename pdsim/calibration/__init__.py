# SPDX-License-Identifier: Apache-2.0
"""Calibrations: the model's parameters, fitted to measurements, with their intervals and errors.

The way of a number from a measurement to a simulated microsecond:

1. `samples` says which transfers to measure and keeps what they took; `importers` reads what other tools printed.
2. `calibrate` fits them: `transfers` declares the forms of an engine's model over the one `robust` fit.
3. ``conf/calibration/NAME.yaml`` is a `definition.Calibration`, with the samples beside it.
4. `pdsim.config` lays it over machine and engine when a run is composed.

`kernels` fits what forwards are made of in the same way, `compaction` thins published tables of operators.
"""
