# SPDX-License-Identifier: Apache-2.0
"""What developers run on the source.  It is not shipped."""
