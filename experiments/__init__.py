# SPDX-License-Identifier: Apache-2.0
"""What is run and what is measured: one file each."""
