# SPDX-License-Identifier: Apache-2.0
"""Many runs as one: points, their collection into one table.

A sweep is a folder.  `points` names each configuration by a hash of what it runs, an executor (`executors`,
`clusters`) runs `measure` on each, `driver` appends the rows to the `ledger` as they come, `collect` makes one
Parquet file and one table of them, and `best` ranks them.  A sweep that is interrupted goes on where it stopped:
points with a final row are not run again.
"""
