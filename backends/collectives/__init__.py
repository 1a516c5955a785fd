# SPDX-License-Identifier: Apache-2.0
"""Groups of real ranks: Gloo on host memory, NCCL and symmetric memory on GPUs.

A rank has one `group.RealGroups`, which makes a `group.RealGroup` for each list of names that is asked for.  It
moves bytes by a `base.Library`, registered under the entry-point group ``pdsim.collectives`` (`libraries`).
"""
