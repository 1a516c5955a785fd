# SPDX-License-Identifier: Apache-2.0
"""A transfer engine of another package."""
