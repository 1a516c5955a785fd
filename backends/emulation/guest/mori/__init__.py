"""MORI in the guest: its wheel wants a newer C library than Debian 12 has, and ROCm."""
