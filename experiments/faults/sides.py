# SPDX-License-Identifier: Apache-2.0
"""The parallelism of prefill and of decode that scenarios choose from."""

from pdsim.models.llm import Side

SIDES = (
    (Side(tp=1), Side(tp=1)),
    (Side(tp=2), Side(tp=2)),
    (Side(tp=2), Side(tp=1)),
    (Side(tp=1), Side(tp=2)),
    (Side(tp=1), Side(tp=4)),
    (Side(tp=4), Side(tp=2)),
    (Side(tp=2), Side(tp=4)),
    (Side(tp=1, instances=2), Side(tp=2)),
    (Side(tp=2), Side(tp=1, instances=2)),
    (Side(tp=1, instances=2), Side(tp=1, instances=2)),
    (Side(tp=1, pp=2), Side(tp=1)),
    (Side(tp=1, cp=2), Side(tp=2)),
    (Side(tp=2, dp=2), Side(tp=1)),
)
WIDE_SIDES = (
    (Side(tp=1, pp=2, cp=2), Side(tp=1)),
    (Side(tp=1, pp=2, cp=2), Side(tp=2, pp=2)),
    (Side(tp=2, pp=2), Side(tp=1, pp=2)),
    (Side(tp=1, pp=2), Side(tp=2, dp=2, pp=2)),
    (Side(tp=1), Side(tp=2, dp=2)),
    (Side(tp=2, dp=2), Side(tp=2, dp=2)),
    (Side(tp=4, dp=2), Side(tp=4, dp=2)),
    (Side(tp=1, instances=3), Side(tp=1, instances=3)),
    (Side(tp=1, cp=2, instances=2), Side(tp=2, instances=2)),
)
REPLICAS = (  # of two heads
    (Side(tp=1), Side(tp=4)),
    (Side(tp=1, instances=2), Side(tp=4)),
    (Side(tp=4), Side(tp=1)),
    (Side(tp=4), Side(tp=1, instances=2)),
)
GROUPS = (
    (Side(tp=2, dp=2), Side(tp=1, instances=2)),
    (Side(tp=2, dp=2), Side(tp=2)),
    (Side(tp=4, dp=4), Side(tp=1, instances=2)),
)
STAGED_SIDES = (
    (Side(tp=2), Side(tp=1)),
    (Side(tp=1), Side(tp=2)),
    (Side(tp=4), Side(tp=2)),
    (Side(tp=2, instances=2), Side(tp=4)),
)
SEVERAL_WRITERS = (
    (Side(tp=2), Side(tp=1)),
    (Side(tp=4), Side(tp=2)),
    (Side(tp=4), Side(tp=1)),
    (Side(tp=2, instances=2), Side(tp=1)),
    (Side(tp=1), Side(tp=2)),
)
PIPELINES = (
    (Side(tp=2, pp=2), Side(tp=1)),
    (Side(tp=1, pp=2), Side(tp=2)),
    (Side(tp=2, pp=2), Side(tp=4)),
    (Side(tp=1, pp=2, instances=2), Side(tp=2)),
)
PAIRS = (  # of several instances on at least one side
    (Side(tp=1, instances=2), Side(tp=1, instances=2)),
    (Side(tp=2, instances=2), Side(tp=1, instances=2)),
    (Side(tp=1, instances=3), Side(tp=2)),
    (Side(tp=1), Side(tp=2, instances=3)),
)
STAGED_PAIRS = (
    (Side(tp=2, instances=2), Side(tp=1, instances=2)),
    (Side(tp=1, instances=3), Side(tp=2)),
    (Side(tp=1, instances=2), Side(tp=2, instances=2)),
)
GATHER_PAIRS = ((Side(tp=1, cp=2, instances=2), Side(tp=1, instances=2)),)
GATHER_SIDES = (
    (Side(tp=1, cp=2), Side(tp=2)),
    (Side(tp=2, cp=2), Side(tp=1)),
    (Side(tp=1, cp=4), Side(tp=1, instances=2)),
    (Side(tp=1, cp=2, instances=2), Side(tp=2)),
)
SHARED_SIDES = (
    (Side(tp=1, cp=4), Side(tp=1)),
    (Side(tp=1, cp=3), Side(tp=2)),
    (Side(tp=2, cp=2), Side(tp=1)),
    (Side(tp=1, cp=2), Side(tp=1, instances=2)),
    (Side(tp=2, cp=2), Side(tp=1, instances=2)),
)
TIER_SIDES = (
    (Side(tp=2), Side(tp=1)),
    (Side(tp=4), Side(tp=2)),
    (Side(tp=1, instances=2), Side(tp=1)),
    (Side(tp=2, instances=2), Side(tp=1, instances=2)),
)
LAYERED_SIDES = (  # some ranks write nothing: of latent models, and of context-parallel ones
    (Side(tp=1), Side(tp=1)),
    (Side(tp=2), Side(tp=1)),
    (Side(tp=1, cp=2), Side(tp=2)),
    (Side(tp=4), Side(tp=2)),
    (Side(tp=1, pp=2), Side(tp=1, instances=2)),
)
FAR_SIDES = (  # one prefill instance is on another node
    (Side(tp=2, instances=3), Side(tp=1)),
    (Side(tp=1, instances=6), Side(tp=2)),
)
DEEP_SIDES = (  # of four layers
    (Side(tp=1, pp=4), Side(tp=1)),
    (Side(tp=1, pp=3), Side(tp=2)),
    (Side(tp=1, pp=3), Side(tp=1, pp=3)),
    (Side(tp=1, pp=4), Side(tp=1, pp=4)),
)
