# SPDX-License-Identifier: Apache-2.0
"""The machine of ``hw.guest``: an emulator with an RDMA device, over this machine's own files.

`machine` makes a kernel and its first files, and boots them; `engines` and `jobs` are the two ends that run jobs.
Nothing that it times says anything about hardware.
"""
