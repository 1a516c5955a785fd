# SPDX-License-Identifier: Apache-2.0
"""The programs of the conformance suite: what ranks do, on whatever implementation of the waist they run."""
