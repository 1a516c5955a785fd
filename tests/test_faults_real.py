"""A job of the campaign of faults on real engines that once left a request without an end."""

from typing import Any

from pdsim.kv.receiver import KvReceiver
from pdsim.sim.faults import Faults, Pause
from pdsim.sim.model import Model
from tests.support.composed import composed
from tools import faults_real
from tools.faults_real import draw


def test_a_notice_that_dies_with_its_sender_stalls_no_request(monkeypatch):
    """Seed 130, once: prefill had told the router that all was written, and was killed before it told decode."""
    job = draw(130)
    killed, notice = job.kill["prefill0.0"], KvReceiver.notice

    def lost_with_prefill(self: KvReceiver, notification: Any) -> None:
        if not killed - 0.2 < self._rank.clock.now < killed:
            notice(self, notification)

    monkeypatch.setattr(KvReceiver, "notice", lost_with_prefill)
    target, specs = faults_real.job(job)
    pauses = tuple(Pause(name, *span) for name, spans in job.pause.items() for span in spans)
    model = Model(composed("hw=loopback").hw, target.engine, "timing", limit=100.0, faults=Faults(pauses=pauses))
    rows = model.run(specs, job.kill, job.restart).ranks["router"].value["rows"]
    assert [status for *_, status in (row[:4] for row in rows) if "before all of its KV" in status] == [
        "PeerLost: prefill0@1 is gone before all of its KV was known to be here"
    ]
    assert {row[3].partition(":")[0] for row in rows} == {"ok", "PeerLost"}
