"""A transfer's record says what it was, and its times are in order."""

from tests.conformance import programs


def test_the_record_describes_the_transfer(job):
    shape = {"count": 10, "size": 100, "region": 4096, "seed": 1}
    outcome = job(
        {
            "writer": (programs.write_blocks, {"to": "target", **shape}),
            "target": (programs.be_written, {"by": "writer", **shape}),
        }
    )
    found = outcome.ranks["writer"].value
    assert found.pop("nbytes") == found.pop("expected")
    assert found == {
        "operation": "write",
        "route": ["writer", "target"],
        "descriptors": 10,
        "ordered": True,
        "status": "ok",
        "label": "blocks",
        "quarantined": 0,
    }


def test_the_recorder_has_every_transfer_and_the_rank_names_its_engine(job):
    payloads = [b"a".hex()] * 5
    outcome = job(
        {
            "writer": (programs.notify_in_turn, {"to": "target", "payloads": payloads}),
            "target": (programs.be_notified, {"by": "writer", "count": 5}),
        }
    )
    records = outcome.ranks["writer"].transfers
    assert len(records) == 5
    assert {record.engine for record in records} == {outcome.ranks["writer"].engine}
    assert not outcome.ranks["target"].transfers


def test_a_read_flows_from_the_peer(job):
    shape = {"count": 1, "size": 100, "region": 4096, "seed": 1}
    outcome = job(
        {
            "reader": (programs.read_blocks, {"of": "target", **shape}),
            "target": (programs.be_read, {"by": "reader", "region": 4096, "seed": 1}),
        }
    )
    assert outcome.ranks["reader"].value["operation"] == "read"
    assert outcome.ranks["reader"].value["route"] == ["target", "reader"]
