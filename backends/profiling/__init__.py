# SPDX-License-Identifier: Apache-2.0
"""Measure the operators of a model's forward on a GPU with PyTorch: the measuring half of ``pdsim profile``."""
