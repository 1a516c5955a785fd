# SPDX-License-Identifier: Apache-2.0
"""The KV-cache transfer protocol, written once over the waist."""
