# SPDX-License-Identifier: Apache-2.0
"""Five changes to real systems, each with a claim, measured before and after on the model and on real engines."""
