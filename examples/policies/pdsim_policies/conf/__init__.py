# SPDX-License-Identifier: Apache-2.0
"""The configuration groups of this package."""
