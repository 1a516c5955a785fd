# SPDX-License-Identifier: Apache-2.0
"""MORI in the guest: its wheel wants a newer C library than Debian 12 has, and ROCm.

`space` makes a Python with the libraries that it wants, `shims` stand in for ROCm, and `serving` is the `Recipe`.
"""
