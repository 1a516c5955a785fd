# SPDX-License-Identifier: Apache-2.0
"""A scheduler, a router policy, an experiment and a machine for pdsim, from outside its repository."""
