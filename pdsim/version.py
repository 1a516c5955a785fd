# SPDX-License-Identifier: Apache-2.0
"""The version of pdsim, in a module of its own, for what is below the face of the package to import."""

__all__ = ["__version__"]

__version__ = "0.2.0"
