# SPDX-License-Identifier: Apache-2.0
"""Max-min fair sharing of links by flows; what is private stays inside this package.

`network` has the public names and the events; `links` what links and paths keep, `waterfill` how rates are found,
and `foreseen` series of flows that need no events.
"""
