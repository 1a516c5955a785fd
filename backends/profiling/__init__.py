# SPDX-License-Identifier: Apache-2.0
"""Measure on a GPU what the forward of a model is made of, with PyTorch: the measuring half of ``pdsim profile``."""
