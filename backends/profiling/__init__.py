# SPDX-License-Identifier: Apache-2.0
"""Measure on a GPU what the forward of a model is made of, with PyTorch: the measuring half of ``pdsim profile``.

`inventory` says what is measured, `measuring` measures it in a process for each GPU, `runner` starts those and keeps
what they find.  A case is plain data, so that these processes need no configuration.  What it becomes on a device is
in `operator_calls`, `attention`, `mixture`, `pointwise` and `decoder`; how long that takes, `stopwatch` says.
"""
