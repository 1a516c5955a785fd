# SPDX-License-Identifier: Apache-2.0
"""What the model's parameters are fitted from, and how well: calibrations, their raw points, and the fit.

The way of a number from a measurement to a simulated microsecond:

1. `sample_grid` says which transfers to measure; ``experiment=transfer`` measures them.
2. `samples` makes one row of each point, or `importers` reads what another tool printed.
3. `from_samples` fits: `fit` chooses among the `forms` for one transfer at a time, `concurrency` adds what several
   in flight tell, `read_overhead` what reads cost beyond writes; `noise_floor` says how much error is noise.
4. `files` writes ``conf/calibration/NAME.yaml``, a `definition.Calibration`, and the samples beside it.
5. `pdsim.config.loading` lays the calibration over machine and engine when a run is composed.
"""
