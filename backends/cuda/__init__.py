"""CUDA memory as a `Device`: the runtime through ctypes, completions, gather and scatter kernels."""
