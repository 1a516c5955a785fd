# SPDX-License-Identifier: Apache-2.0
"""The model: links that flows share fairly, engines that post descriptors, memory of limited capacity.

Everything here is below the waist (`pdsim.transfer`) and knows nothing of requests.
"""
