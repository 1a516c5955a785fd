"""Groups of real ranks: Gloo on host memory, NCCL and symmetric memory on GPUs."""
