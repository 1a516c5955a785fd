"""`pdsim timeline`: the trace-event format kept to the letter, and what the rows of a run say, nothing else."""

import gzip
import json
from collections import Counter
from itertools import pairwise

import pytest

import pdsim
from experiments import serve
from pdsim.cli.main import main
from pdsim.results import store
from pdsim.results.record import Result
from pdsim.results.timeline import trace
from tests.support.configs import make_config

PULLED = ["hw=2xh200", "model=qwen3-8b", "parallel=tp1", "workload=smoke", "engine=vllm", "backend=nixl"]
STAGED = ["hw=8xh200", "workload.count=12", "parallel.decode.tp=2", "kv.staging=true", "samples=50"]
LIVE = {
    "id": [0, 1], "arrival": [0.0, 1.0], "input": [8, 9], "output": [3, 3], "status": ["ok", "Timeout: late"],
    "prefill": ["p", "p"], "decode": ["d", "d"], "sent": [0.25, 1.0], "ttft": [1.0, None], "e2e": [2.0, None],
    "prefilled": [0.5, None], "handoff": [0.5, None],
}  # fmt: skip
"""Two requests of a live deployment, of which one failed, as `experiments.serve` keeps them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    output = tmp_path_factory.mktemp("results")
    live = make_config(output / "live", target="live", experiment=serve.ServeOptions())
    runs = {"pushed": STAGED, "pulled": PULLED}
    made = {name: pdsim.simulate(*words, output=output).folder for name, words in runs.items()}
    return made | {"live": store.Run(live).finish(Result(summary=[], requests=LIVE))}


@pytest.fixture(scope="module")
def drawn(folders, tmp_path_factory):
    """Return a function of the names of runs, which returns their events."""
    path = tmp_path_factory.mktemp("traces") / "trace.json"

    def draw(*names):
        assert main(["timeline", *(str(folders[name]) for name in names), "-o", str(path)]) == 0
        return json.loads(path.read_text())["traceEvents"]

    return draw


def of(events, *kinds):
    return [event for event in events if event["ph"] in kinds]


def names(events, what):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in of(events, "M") if e["name"] == what}


def test_runs_side_by_side_keep_to_the_format_of_traces(drawn):
    events = drawn("pushed", "pulled", "live")
    needs = {"M": {"args"}, "X": {"ts", "dur", "tid"}, "C": {"ts", "args"}, "s": {"ts", "id", "tid"}}
    needs |= {"t": needs["s"], "f": needs["s"] | {"bp"}}
    assert all({"name", "pid", *needs[event["ph"]]} <= set(event) for event in events)
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    assert timed[0] >= 0
    shown = names(events, "process_name")
    assert {e["pid"] for e in events} == {pid for pid, _ in shown}
    assert {"A: prefill0", "A: decode0.0", "C: p", "C: d"} <= set(shown.values())
    tracks: dict = {}
    for e in of(events, "X"):
        assert e["dur"] >= 0
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert set(tracks) == set(names(events, "thread_name"))
    for spans in tracks.values():
        assert all(end <= begin + 1e-4 for (_, end), (begin, _) in pairwise(sorted(spans)))
    begins, ends = (Counter(e["id"] for e in of(events, kind)) for kind in "sf")
    assert begins == ends
    assert set(begins.values()) == {1}
    for e in of(events, "s", "t", "f"):
        assert any(begin <= e["ts"] <= end for begin, end in tracks[e["pid"], e["tid"]])


@pytest.mark.parametrize("name", ["pushed", "pulled"])
def test_slices_are_the_instants_of_the_requests(folders, drawn, name):
    run, events = pdsim.load(folders[name]), drawn(name)
    slices = {e["name"]: e for e in of(events, "X") if e["cat"] == "prefill"}
    rows = run.requests.to_pylist()
    begin = slices["request 0"]["ts"] - 1e6 * rows[0]["started_at"]  # of the workload, on the clock of the trace
    assert begin >= -0.01
    for row in rows:
        slice_ = slices[f"request {row['id']}"]
        assert slice_["ts"] - begin == pytest.approx(row["started_at"] * 1e6, abs=0.01)
        assert slice_["dur"] == pytest.approx((row["prefilled_at"] - row["started_at"]) * 1e6, abs=0.01)
    assert len(of(events, "s")) == run.requests.num_rows
    wires = [e["args"]["request"] for e in of(events, "X") if e["cat"].endswith(": wire")]
    assert (len(wires), set(wires)) == (run.transfers.num_rows, set(range(run.requests.num_rows)))


def test_a_live_request_has_prefill_handoff_and_decode(drawn):
    assert [(e["cat"], e["ts"], e["dur"]) for e in of(drawn("live"), "X")] == [
        ("waiting for a connection", 0.0, 0.25e6),
        ("prefill", 0.25e6, 0.25e6),
        ("handoff", 0.5e6, 0.5e6),
        ("decode", 1.0e6, 1.0e6),
        ("waiting for a connection", 1.0e6, 0.0),
    ]


def test_a_trace_is_compressed_by_name_and_reproducible(folders, tmp_path):
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    assert trace([folders["pulled"]], plain) == trace([folders["pulled"]], packed) > 0
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert main(["timeline", str(folders["pulled"])]) == 0
    assert (folders["pulled"] / "timeline.json.gz").read_bytes() == packed.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "timeline needs the folder of a run"),
        (("{pushed}", "-o", "a.pftrace"), "-o a.pftrace: a trace is a file .json or .json.gz"),
        (("{pushed}", "-o", "/nowhere/t.json"), "No such file or directory; name a file that can be written with"),
        (("{empty}",), "kept no requests and no transfers that ended, so it has no timeline"),
    ],
)
def test_what_has_no_timeline_is_refused_in_one_line(folders, tmp_path, pdsim_says, words, message):
    empty = store.Run(make_config(tmp_path)).finish(Result(summary=[]))
    words = [word.format(pushed=folders["pushed"], empty=empty) for word in words]
    status, _, said = pdsim_says("timeline", *words)
    assert (status, said.count("\n")) == (2, 1)
    assert message in said
