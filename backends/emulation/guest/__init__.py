# SPDX-License-Identifier: Apache-2.0
"""The machine of ``hw.guest``: an emulator with an RDMA device, over this machine's own files.

`image` makes a kernel and its first files from Debian packages, `machine` boots them, `server` and `jobs` are the
two ends that run jobs there, `engines` is the `pdsim.transfer.job.Target`, and a `recipe` says how an engine is
started.  All of it is for tests of code that needs an RDMA device; nothing that it times says anything about
hardware.
"""
