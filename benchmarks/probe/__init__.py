# SPDX-License-Identifier: Apache-2.0
"""An independent probe of transfer engines and all-gathers, on the bare libraries.

    python -m benchmarks.probe predict --to FILE.csv             # what the model says for every point, before
    measuring python -m benchmarks.probe measure --to FILE.csv             # on a machine with two GPUs: at most five
    minutes python -m benchmarks.probe measure --host --to FILE.csv      # the same programs over loopback TCP, a dry
    run python -m benchmarks.probe judge PREDICTED.csv MEASURED.csv

It shares no code with `backends`: `drivers` calls Mooncake and NIXL as an engine's user does, `gathers` calls NCCL
through PyTorch.  Only `predictions` imports pdsim, so that `measure` needs a Python with the libraries and nothing
else.  `plan` says which points there are; both sides read them there.
"""
