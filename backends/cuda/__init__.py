# SPDX-License-Identifier: Apache-2.0
"""CUDA memory as a `pdsim.transfer.Device`: the runtime through ctypes, completions, gather and scatter kernels."""
