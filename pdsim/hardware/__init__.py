# SPDX-License-Identifier: Apache-2.0
"""Machines, NICs and links, and what transfer engines and collectives cost on them."""
