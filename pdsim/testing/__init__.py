# SPDX-License-Identifier: Apache-2.0
"""The contract of the transfer interface as tests, for any implementation of it: ``pytest --pyargs pdsim.testing``.

``--backend NAME`` runs it for one backend of an installed package, ``--collective NAME`` its part about groups.  A
backend is done when that passes.

The tests compare what programs return; they know no engine.  A test that fails names the rule that was broken.
"""
