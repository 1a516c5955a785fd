# SPDX-License-Identifier: Apache-2.0
"""Who moves the KV: prefill pushes it, or decode pulls it."""
