# SPDX-License-Identifier: Apache-2.0
"""A link of known rate and delay between network namespaces, made in user space."""
