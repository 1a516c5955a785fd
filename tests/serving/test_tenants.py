"""Several tenants at once: their requests, their limits, and what share of each meets its own."""

from dataclasses import replace

import numpy as np
import pytest

from pdsim.config import rules
from pdsim.core.errors import ConfigError
from pdsim.serving.settings import Tenant, Workload
from pdsim.serving.workload import draw
from tests.support.composed import composed
from tests.support.serving import ONE, configured, rows, serve, values

CHAT = Tenant(name="chat", rate=8.0, ttft=10.0, tpot=1e-9, input_mean=100, output_mean=10, priority=2)
BATCH = Tenant(name="batch", rate=2.0, ttft=10.0, tpot=10.0, input_mean=900, input_cv=0.0, output_mean=20)
BOTH = Workload(arrivals="poisson", count=500, tenants=(CHAT, BATCH))


def test_each_tenant_has_its_rate_its_lengths_and_its_priority():
    table = draw(BOTH, 0, 100_000).requests
    assert len(table) == 500
    assert (np.diff(table.arrival) >= 0).all()
    assert float(np.mean(table.tenant == 0)) == pytest.approx(0.8, abs=0.05)
    assert set(table.input[table.tenant == 1]) == {900}
    assert float(table.input[table.tenant == 0].mean()) == pytest.approx(100, rel=0.15)
    assert table.priority.tolist() == [2 if which == 0 else 0 for which in table.tenant]
    assert 500 / table.arrival[-1] == pytest.approx(10, rel=0.15)


def test_another_tenant_changes_nothing_of_the_requests_of_one():
    alone, both = (draw(replace(BOTH, tenants=each), 3, 100_000).requests for each in ((BATCH,), (CHAT, BATCH)))
    own = both.taken(both.tenant == 1)
    assert own.arrival.tolist() == alone.arrival[: len(own)].tolist()
    assert own.output.tolist() == alone.output[: len(own)].tolist()


def test_every_request_counts_toward_the_limits_of_its_tenant():
    served = serve(configured(ONE, ONE, workload=replace(BOTH, count=100)))
    table = rows(served)
    assert {(row["tenant"], row["slo_tpot"]) for row in table} == {("chat", 1e-9), ("batch", 10.0)}
    (shares,) = [each for each in served.tables if each.title == "Tenants"]
    # a chat of one token has no time per token
    short = [row["output"] == 1 for row in table if row["tenant"] == "chat"]
    batch = sum(row["tenant"] == "batch" for row in table)
    assert [row[:3] for row in shares.rows] == [["chat", len(short), sum(short) / len(short)], ["batch", batch, 1.0]]
    assert values(served)["slo_attainment"] == (sum(short) + batch) / 100


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("workload.rate=3",), "workload.rate is each tenant's own"),
        (("workload.arrivals=sessions",), "workload.tenants generate requests"),
        (("workload.priority=0.5",), "workload.priority=0.5 is each tenant's own"),
        (("model.context=4096",), r"8000 \+ 500 tokens of workload.tenants batch exceed"),
    ],
)
def test_tenants_refuse_what_they_replace(words, reason):
    with pytest.raises(ConfigError, match=reason):
        rules.check(composed("workload=tenants", *words))
