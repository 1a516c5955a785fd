# SPDX-License-Identifier: Apache-2.0
"""Router, prefill and decode engines, and the workloads that they serve."""
