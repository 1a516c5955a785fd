# SPDX-License-Identifier: Apache-2.0
"""Jobs on real engines: one process per rank, watched by a launcher, a `pdsim.transfer.job.Target`."""
