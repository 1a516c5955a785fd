# SPDX-License-Identifier: Apache-2.0
"""The parts of real endpoints that every engine shares."""
