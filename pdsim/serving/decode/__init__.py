# SPDX-License-Identifier: Apache-2.0
"""The decode side of serving: scheduler, block manager, worker."""
