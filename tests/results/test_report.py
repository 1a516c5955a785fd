"""What people read: every number with its definition and evidence; what machines read: one JSON object."""

import io
from dataclasses import replace

import pytest

import pdsim
from pdsim.results import terminal as report
from pdsim.results.record import Metric, Table
from pdsim.results.report.page import run_content
from pdsim.results.store import Run
from pdsim.transfer.job import Outcome
from tests.support.configs import MACHINE, make_config, make_result


class Terminal(io.StringIO):
    def isatty(self):
        return True


def printed(folder, file=None, *, verbose=True):
    file = io.StringIO() if file is None else file
    report.show(folder, file, verbose=verbose)
    return file.getvalue()


def test_every_number_has_its_definition_and_evidence(config):
    note = "long [offered] " * 40
    folder = Run(config).finish(make_result(failures=["rank1: PeerLost: gone"], notes=[note.strip()]))
    text = printed(folder)
    assert text.isascii()
    for line in (
        "bw_gbs      5.250  bytes over time",
        "  B/W: GB/s",
        "  pattern: who sends to whom",
        "evidence: measured for backend.intra.call",
        "weakest evidence: assumed:",
        "  hw.host.memory: as in the shop",
        f"note: {note.strip()}",
        "failed: rank1: PeerLost: gone",
        f"results: {folder}",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize("verbose", [True, False])
def test_without_evidence_no_number_is_printed(tmp_path, verbose):
    config = make_config(tmp_path, hw=replace(MACHINE, sources={}))
    text = printed(Run(config).finish(make_result()), verbose=verbose)
    assert "5.25" not in text
    assert "evidence: none, so no number is printed" in text


def test_numbers_have_four_digits_and_narrow_terminals_fewer_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    file = Terminal()
    report.show_table(Table("Points", {f"column{n}": f"number {n}" for n in range(6)}, [[1.5] * 6]), file)
    assert "column3: number 3" in file.getvalue()
    assert "column4: " not in file.getvalue()
    assert "columns hidden (narrow terminal): column4, column5" in file.getvalue()
    values = (None, 0.0, 7, 123456789, 12.3456, 123.456, 0.123456, -5.25, 1.5e-5, 2.5e9, "ok")
    texts = ["-", "0", "7", "123456789", "12.35", "123.5", "0.1235", "-5.250", "1.500e-05", "2.500e+09", "ok"]
    assert [report.cell(value) for value in values] == texts


# --- the dozen lines


def served(**changes):
    """Return the metrics of a run that served four requests."""
    values = {"requests": 4, "requests_ok": 4, "requests_failed": 0, "makespan_s": 90.0, "request_rate": 4 / 90}
    values |= {"goodput": 3 / 90, "slo_attainment": 0.75, "share_queueing": 0.9, "share_compute": 0.0996}
    values |= {"share_transfer": 0.0003, "ttft_p50_s": 50e-6, "ttft_p90_s": 1.25, "ttft_p99_s": None}
    return [Metric(name, value, "") for name, value in (values | changes).items()]


def test_a_served_run_says_what_matters_in_dozen_lines(config):
    outcome = Outcome({}, 90.0, links={"node0/gpu0/out": 3.3e-4, "node0/gpu1/out": 1e-4}, pools={"host": 0.941})
    notes = ["load: prefill 200 %, decode 50 % of capacity", "warning: a", "warning: b"]
    folder = Run(config, command=["pdsim", "run", "--config-dir=mine"], overrides=["hw=toy", "seed=3"]).finish(
        make_result(summary=served(offered_load_prefill=2.0), tables=[], notes=notes, outcome=outcome)
    )
    assert printed(folder, verbose=False).splitlines() == [
        "transfer tiny on toy: embedded trace, 1 x TP1 -> 1 x TP1, generic, fast (model), seed 0, pdsim "
        f"{pdsim.__version__}",
        "load: prefill 200 %, decode 50 % of capacity",
        "SLO: 75.0 % of 4 requests meet TTFT <= 5 s and TPOT <= 50 ms (goal 99 %); "
        "4 served in 1.5 min (0.0444/s, 0.0333/s within the SLO)",
        "                   p50       p90       p99",
        "TTFT             50 us    1.25 s         -",
        "TPOT                 -         -         -",
        "end to end           -         -         -",
        "KV exposed           -         -         -",
        "bound by queueing 90.0 %, compute 10 %, busiest link 0.033 %, fullest memory 94.1 %; "
        "requests wait for an instance: add instances, or lower the load",
        "evidence: the numbers are estimates: hw.host.memory is assumed (as in the shop)",
        "warning: a (and 1 more: -v)",
        f"results: {folder}",
        "next:",
        f"  pdsim explain {folder}",
        "  pdsim sweep --config-dir=mine hw=toy seed=0,1,2",
    ]
    page = run_content(folder)
    assert page.provenance["command"] == "pdsim run --config-dir=mine hw=toy seed=3"
    assert "warning: a" in page.warnings
    assert not any("-v" in line for line in (*page.warnings, *page.lines))


@pytest.mark.parametrize(
    ("words", "layout"),
    [((), "2 x TP4"), (("parallel=tp2", "parallel.decode.instances=2"), "3 x TP2"), (("hw.gpus=4",), "1 x TP4")],
)
def test_a_colocated_run_names_the_engines_that_served(tmp_path, words, layout):
    own = ("hw=8xh200", "experiment.deployment=colocated", "workload=smoke", "workload.count=1", *words)
    run = pdsim.simulate(*own, output=tmp_path)
    assert f", {layout}, sglang, " in report.headline(run.about, run.folder)


@pytest.mark.parametrize(("nodes", "path"), [(1, "intra"), (2, "inter")])
def test_the_evidence_of_a_slow_transfer_is_of_its_path(config, nodes, path):
    sources = dict.fromkeys(("intra", "inter", "inter.descriptor", "intra.descriptor"), "assumed: here")
    slow = replace(config, hw=replace(config.hw, nodes=nodes), backend=replace(config.backend, sources=sources))
    folder = Run(slow).finish(make_result(summary=served(share_transfer=0.95, share_queueing=0.0), tables=[]))
    assert f"backend.{path}.descriptor is assumed (here; " in printed(folder, verbose=False)


@pytest.mark.parametrize(("e2e", "cause"), [(10.0, "decode steps dominate"), (1.5, "prefill compute dominates")])
def test_compute_is_that_of_the_side_that_takes_longer(config, e2e, cause):
    metrics = served(share_queueing=0.0, share_compute=1.0, ttft_avg_s=1.0, e2e_avg_s=e2e)
    text = printed(Run(config).finish(make_result(summary=metrics, tables=[])), verbose=False)
    assert "bound by compute 100.0 %" in text
    assert f"; {cause}: " in text


@pytest.mark.parametrize(("part", "cause"), [("transfer", "KV arrives late"), ("queueing", "requests wait")])
def test_a_missed_ttft_names_what_takes_most_of_it(config, part, cause):
    shares = {"share_queueing": 0.0, "share_compute": 0.7, f"share_{part}": 0.3}
    metrics = served(**shares, ttft_avg_s=4.0, e2e_avg_s=10.0, ttft_p99_s=6.0, tpot_p99_s=0.01, slo_attainment=0.9)
    text = printed(Run(config).finish(make_result(summary=metrics, tables=[])), verbose=False)
    assert f"; TTFT is too long, as {cause}" in text


def test_any_other_run_has_its_first_table_and_omissions(config):
    rows = [["pair", number * 1.5] for number in range(10)]
    table = Table("Points", {"pattern": "who sends to whom", "B/W": "GB/s"}, rows)
    folder = Run(config).finish(make_result(tables=[table], failures=["a", "b", "c", "d"]))
    lines = printed(folder, verbose=False).splitlines()
    assert lines[1:4] == ["Points", "pattern    B/W", "   pair      0"]
    assert "... and 5 more: -v" in lines
    assert lines[lines.index("failed: a") :][:4] == ["failed: a", "failed: b", "failed: c", "... and 1 more: -v"]
