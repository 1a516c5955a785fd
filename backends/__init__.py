# SPDX-License-Identifier: Apache-2.0
"""Real transfer engines, each an implementation of the waist (`pdsim.transfer`) on real memory."""
