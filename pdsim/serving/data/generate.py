# SPDX-License-Identifier: Apache-2.0
"""Make the embedded trace: ``python pdsim/serving/data/generate.py`` writes it beside this file, always the same.

The numbers are of our own making.  Arrivals are Poisson with a rate that swings slowly between 0.4 and 1.2 a second;
inputs and outputs are log-normal, means near 1,400 and 180 tokens, as short chats with some long documents.  Only
`random.random` is drawn from, whose sequence Python promises to keep.
"""

import json
import math
import random
from pathlib import Path
from statistics import NormalDist

SEED = 20240
COUNT = 200
LONGEST = 7000  # tokens of input, so that small models and small pools serve the trace too


def lines() -> list[str]:
    """Return the trace in Mooncake's format, one request a line."""
    draw = random.Random(SEED).random
    normal = NormalDist()
    rows, now = [], 0.0
    for _ in range(COUNT):
        rate = 0.8 + 0.4 * math.sin(2 * math.pi * now / 90)
        now += -math.log(1 - draw()) / rate
        given = 900 * math.exp(0.95 * normal.inv_cdf(draw()))
        wanted = 140 * math.exp(0.7 * normal.inv_cdf(draw()))
        row = {
            "timestamp": round(now * 1e3),
            "input_length": min(LONGEST, max(8, round(given))),
            "output_length": min(1000, max(2, round(wanted))),
        }
        rows.append(json.dumps(row))
    return rows


if __name__ == "__main__":
    path = Path(__file__).with_name("conversation_small.jsonl")
    path.write_text("\n".join(lines()) + "\n", encoding="utf-8")
