# SPDX-License-Identifier: Apache-2.0
"""The baseline without disaggregation: one engine that prefills and decodes, chunks and tokens in the same steps.

`program` is the one rank of the job, with arrivals and routing; `engine` is an engine.  Both use the schedulers, the
router policies and the time of a forward that disaggregated serving uses, so that the two can be compared.
"""
