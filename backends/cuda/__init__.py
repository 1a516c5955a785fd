# SPDX-License-Identifier: Apache-2.0
"""CUDA memory as a `Device`: the runtime through ctypes, completions, gather and scatter kernels.

`runtime` is the only module that calls CUDA directly; `device` makes a `pdsim.transfer.Device` of it; `completions`
tells the wall clock what is done; `gather` copies many pieces by one kernel, `gather_kernel`.
"""
