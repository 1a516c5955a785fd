# SPDX-License-Identifier: Apache-2.0
"""Machines that this one can stand for: nodes joined by a link of known rate, and a host with an RDMA device."""
