# SPDX-License-Identifier: Apache-2.0
"""Clock, events, errors, units and entry points: nothing here knows about transfers or serving."""
