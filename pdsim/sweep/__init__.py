# SPDX-License-Identifier: Apache-2.0
"""Many runs as one: a folder of points and one table of them.

`points` names each configuration by a hash of what it runs, an executor (`executors`, `clusters`) measures each,
`driver` appends the rows as they come to the files of `collect`, and `best` ranks them.  A sweep that is interrupted
goes on where it stopped: points with a final row are not run again.
"""
