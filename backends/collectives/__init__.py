# SPDX-License-Identifier: Apache-2.0
"""Groups of real ranks: Gloo on host memory, NCCL and symmetric memory on GPUs."""
