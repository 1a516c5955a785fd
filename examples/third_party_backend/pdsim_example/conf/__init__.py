# SPDX-License-Identifier: Apache-2.0
"""Configuration groups of this package, beside those of pdsim."""
