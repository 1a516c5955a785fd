# SPDX-License-Identifier: Apache-2.0
"""Jobs on real engines: one process per rank, watched by a launcher.

`launcher.Processes` is the `pdsim.transfer.job.Target`.  It starts `worker` processes, speaks to them in the
messages of `supervision`, and gives each the processors that `affinity` deals out.
"""
