"""`pdsim diagnose` names the cause of transfers that were made slow on purpose, of real and of public ones."""

import csv
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from backends.emulation.link.emulated_link import missing_requirements
from pdsim.calibration.diagnosis import EXPECTED, Explanation, explanations, timings
from pdsim.calibration.samples import Sample
from pdsim.cli import diagnose
from pdsim.cli.main import main
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.files import data
from pdsim.hardware.costs import EngineModel
from tests.support.engines import MARKED

HW = compose(["hw=2x8xh100", "backend=nixl"]).hw
MODEL = EngineModel(path="rdma", call=2e-6, descriptor=1e-6, overlap=True, latency=5e-6, rate=40e9)
TCP = EngineModel(path="tcp", call=20e-6, descriptor=6e-6, overlap=True, latency=0.0, rate=2e9)
LINE = 49.6e9
KINDS = ((1, 4096), (1, 1 << 20), (64, 65536), (2000, 8192))
# vllm issue 34054, of a pair on one host that its author thought to be without NVLink
PUBLIC = """\
KV Transfer metrics: Num successful transfers=80, Avg xfer time (ms)=173.794, P90 xfer time (ms)=235.706, \
Avg post time (ms)=129.127, P90 post time (ms)=131.126, Avg MB per transfer=313.0, Throughput (MB/s)=1800.983, \
Avg number of descriptors=40064.0
"""
METRICS = """\
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.5"} 80.0
vllm:nixl_xfer_time_seconds_count{engine="0"} 80.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 13.90352
vllm:nixl_post_time_seconds_sum{engine="0"} 10.33016
vllm:nixl_bytes_transferred_sum{engine="0"} 2.6256343e+10
vllm:nixl_num_descriptors_sum{engine="0"} 3.20512e+06
"""


def made(model: EngineModel, line: float, split: int = 1, *, posted: bool = False) -> list[Sample]:
    rows = []
    for blocks, size in KINDS:
        seconds = model.isolated_time(blocks * split, blocks * size, line)
        posting = model.posting(blocks * split) if posted else 0.0
        rows.append(Sample(blocks=blocks, size=size, seconds=seconds, low=seconds, high=seconds, posting=posting))
    return rows


def first(samples: list[Sample]) -> Explanation:
    return explanations(samples, MODEL, HW, LINE, TCP)[0]


@pytest.mark.parametrize("posted", [False, True])
def test_transfers_of_the_model_are_as_expected(posted):
    samples = made(MODEL, LINE, posted=posted)
    assert first(samples) == Explanation(EXPECTED, 1.0, 0.0, "nothing is slower than it should be", True)
    assert [(one.expected, one.posting) for one in timings(samples, MODEL, LINE)] == [
        (one.seconds, MODEL.posting(one.blocks)) for one in samples
    ]


@pytest.mark.parametrize(
    ("cause", "slow", "line", "factor"),
    [
        ("slow wire", replace(MODEL, rate=MODEL.rate / 4), LINE / 4, 4.0),
        ("slow host", replace(MODEL, call=8 * MODEL.call, descriptor=8 * MODEL.descriptor), LINE, 8.0),
        ("late completions", replace(MODEL, latency=MODEL.latency + 1e-3), LINE, None),
        ("over TCP", TCP, HW.host.tcp_rate, 1.0),
    ],
)
def test_each_cause_is_found_with_its_factor(cause, slow, line, factor):
    one = first(made(slow, line))
    assert one.cause == cause
    assert one.unexplained < 0.01
    assert factor is None or one.factor == pytest.approx(factor, rel=0.02)


def test_descriptors_of_a_log_that_counts_none_are_found():
    whole = [(blocks * size, MODEL.isolated_time(512, blocks * size, LINE)) for blocks, size in KINDS]
    rows = [Sample(blocks=1, size=size, seconds=time, low=time, high=time, counted=False) for size, time in whole]
    one = first(rows)
    assert (one.cause, one.factor) == ("more descriptors", pytest.approx(512, rel=0.02))


@pytest.mark.parametrize(("late", "cause"), [(5e-3, "memory mapped anew"), (2e-4, "late completions")])
def test_constant_that_no_poller_takes_is_memory_mapped_anew(late, cause):
    nvlink = EngineModel(path="nvlink", call=10e-6, descriptor=5e-6, overlap=True, latency=0.0, rate=390e9)
    rows = [
        replace(one, seconds=nvlink.isolated_time(one.blocks, one.blocks * one.size, 400e9) + late)
        for one in made(MODEL, LINE)
    ]
    assert explanations(rows, nvlink, HW, 400e9, TCP)[0].cause == cause


def test_rate_that_falls_with_the_size_is_a_library_that_stages():
    rows = [replace(one, seconds=one.seconds * (4 if one.size > 65536 else 1)) for one in made(MODEL, LINE)]
    one = first(rows)
    assert (one.cause, one.factor, one.seen) == (
        "staged messages",
        pytest.approx(4.6, rel=0.01),
        ("the rate falls at 1 MiB",),
    )
    assert "staged messages" not in {each.cause for each in explanations(made(MODEL, LINE), MODEL, HW, LINE, TCP)}


BULK = Sample(blocks=1, size=1 << 28, seconds=1.0, low=1.0, high=1.0)


def bulk(rate: float, **more: object) -> Sample:
    return replace(BULK, **{"seconds": BULK.size / rate, **more})


@pytest.mark.parametrize(
    ("beside", "cause"),
    [
        (bulk(MODEL.rate, memory="host"), "slow GPU memory"),
        (bulk(MODEL.rate / 2.5, memory="host"), "slow wire"),
        (bulk(LINE, bare=True), "slow engine"),
        (bulk(LINE / 2.5, bare=True), "slow wire"),
        (bulk(LINE / 2.5, bare=True, memory="gpu"), "slow wire"),
    ],
)
def test_what_is_beside_slow_transfers_tells_where(beside, cause):
    one = first([bulk(MODEL.rate / 2.5, memory="gpu"), beside])
    assert (one.cause, one.factor) == (cause, pytest.approx(2.5, rel=0.02))
    assert one.unexplained < 0.01


@pytest.fixture
def diagnosed(pdsim_prints):
    return lambda *words: json.loads(pdsim_prints("diagnose", *words, "--json"))


@pytest.fixture
def causes(diagnosed):
    """Return a function that gives the factor of each cause and what it leaves unexplained, the best first."""
    return lambda *words: {one["cause"]: (one["factor"], one["unexplained"]) for one in diagnosed(*words)["causes"]}


def test_logs_of_two_runs_are_read_together(tmp_path, diagnosed):
    wire, slow = tmp_path / "wire.txt", tmp_path / "vram.csv"
    text = (Path(__file__).parent / "outputs" / "perftest.txt").read_text()
    wire.write_text(f"{text} 8388608    5000             396.79             396.70   \t\t   0.005911\n")
    slow.write_text("pattern,blocks,size,seconds\npair,1,268435456,0.02")
    said = diagnosed(slow, wire, "hw=2x8xh100", "backend=nixl")
    assert said["causes"][0]["cause"] == "slow engine"


def test_one_kind_of_transfer_leaves_open_what_posting_tells():
    rows = explanations(made(replace(MODEL, rate=1e9), 1e9)[3:], MODEL, HW, LINE, TCP)
    assert {one.cause for one in rows if one.alike} >= {"slow wire", "slow host", "late completions"}
    rows = explanations(made(replace(MODEL, rate=1e9), 1e9, posted=True)[3:], MODEL, HW, LINE, TCP)
    assert "slow host" not in {one.cause for one in rows if one.alike}


@pytest.mark.parametrize(
    ("factor", "said"), [(2.0, "card of the other socket"), (8.0, "all ranks on one card of 8"), (3.0, "about 3.0")]
)
def test_a_wire_slower_by_a_known_factor_names_it(factor, said):
    assert said in first(made(replace(MODEL, rate=MODEL.rate / factor), LINE / factor)).remedy


def test_public_logs_are_as_expected_with_counts_or_without(tmp_path, pdsim_prints):
    log = tmp_path / "decode.log"
    log.write_text(PUBLIC)
    words = ("diagnose", log, "hw=8xh100", "backend=nixl_vllm")
    out = pdsim_prints(*words)
    assert "transfers are as expected, 10% off in the mean" in out
    assert "posting of 40064 descriptors decides: with blocks four times as large a transfer takes 38.6 ms" in out
    log.write_text(PUBLIC.replace(", Avg number of descriptors=40064.0", "").replace("=173.794", "=0.2"))
    assert "nothing is slow: every transfer is faster than the model" in pdsim_prints(*words)


# means of NIXL with UCX_TLS=tcp on loopback, two cores under a load of 15
BUSY = {(1, 4096): 1.4e-3, (4, 4096): 1.77e-3, (32, 4096): 3.81e-3, (256, 4096): 8.34e-3, (1, 65536): 1.34e-3,
        (4, 65536): 2.39e-3, (32, 65536): 10.7e-3, (256, 65536): 46.6e-3}  # fmt: skip


def test_a_machine_and_an_engine_that_nobody_named_are_said(tmp_path, pdsim_prints):
    (log := tmp_path / "decode.log").write_text(PUBLIC)
    said = "warning: hw=8xh20 and backend=mooncake_nvlink by default; name those that the times are of"
    assert pdsim_prints("diagnose", log).splitlines()[1] == said
    assert "warning: " not in pdsim_prints("diagnose", log, "hw=2x8xh100", "backend=nixl_vllm")


def test_tcp_on_a_busy_host_is_no_late_completion(tmp_path, diagnosed):
    """Every transfer waits for a processor, and none of the causes fits well."""
    file = tmp_path / "transfers.csv"
    rows = [f"pair,{blocks},{size},{seconds}" for (blocks, size), seconds in BUSY.items()]
    file.write_text("\n".join(["pattern,blocks,size,seconds", *rows]))
    said = diagnosed(file, "hw=loopback", "backend=nixl_shm")
    assert said["causes"][0]["cause"] == "over TCP"


LINES = data("benchmarks", "public_transfers.csv").read_text().splitlines()
PUBLIC_ROWS = list(csv.DictReader(line for line in LINES if not line.startswith("#")))
FIRST = {(row["predicted"], row["concurrency"] == "1"): row["thread"] for row in reversed(PUBLIC_ROWS)}.values()
"""One thread for each cause; CI's slow part has all."""
SLOW = pytest.mark.slow


@pytest.mark.parametrize("row", [pytest.param(it, marks=[SLOW] * (it["thread"] not in FIRST)) for it in PUBLIC_ROWS])
def test_public_threads_are_diagnosed_as_recorded(row, tmp_path, pdsim_prints):
    names = ("blocks", "size", "concurrency", "operation", "seconds", "posting", "memory", "bare")
    rows = [row | {"bare": "0"}]
    for one in filter(None, row["beside"].split(";")):
        what, seconds = one.split(" ")
        other = {"bare": "1"} if what == "bare" else {"bare": "0", "size" if what.isdecimal() else "memory": what}
        rows.append(row | other | {"seconds": seconds, "posting": "0"})
    file, said = tmp_path / "transfers.csv", tmp_path / "said.txt"
    lines = [",".join(one[name] for name in names) for one in rows]
    file.write_text("\n".join([f"pattern,{','.join(names)}", *(f"pair,{line}" for line in lines)]))
    said.write_text(row["said"] or "")
    out = pdsim_prints("diagnose", str(file), *[str(said)] * bool(row["said"]), *row["words"].split())
    if row["predicted"] == "posting":
        assert f"posting of {row['blocks']} descriptors decides" in out
    else:
        assert (
            f"likely: {row['predicted']}" in out
            or f"no single cause explains these times; {row['predicted']}" in out
        )
    assert ("threads that share the links" in out) == (row["concurrency"] != "1")


def test_metrics_of_a_server_are_read_from_its_address(tmp_path, diagnosed):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode() if self.path == "/metrics" else b"<html>")

        def log_message(self, *_: object) -> None: ...

    (tmp_path / "decode.log").write_text(PUBLIC)
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        own = diagnosed(url, "hw=8xh100", "backend=nixl_vllm")
        with pytest.raises(ConfigError, match=f"{url}s is in no format that is recognised; name one with --format"):
            diagnose.diagnose([f"{url}s"])
        server.shutdown()
    (row,) = own["transfers"]
    sample = row["sample"]
    assert (sample["blocks"], sample["size"], sample["seconds"]) == (40064, 8192, pytest.approx(0.173794))
    assert sample["posting"] == pytest.approx(0.129127)


def test_run_of_transfers_is_read_from_its_folder(tmp_path, diagnosed):
    words = ["experiment=transfer", "hw=2xh200", "backend=nvlink", "experiment.patterns=[pair]"]
    more = ["experiment.repeat=3", "experiment.warmup=0", f"output={tmp_path}", "--quiet"]
    assert main(["run", *words, *more]) == 0
    answer = diagnosed(next(tmp_path.iterdir()))
    assert (answer["backend"], answer["hw"], answer["path"]) == ("nvlink", "2xh200", "intra")
    assert answer["causes"][0]["cause"] == EXPECTED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "diagnose needs a log, folder or URL; see pdsim diagnose --help"),
        (["{wire}"], "perftest.txt measures the wire alone; name what the engine took beside it"),
        (["{image}"], "image.log: 'utf-8' codec can't decode byte 0x89"),
        (["nothing.log"], "nothing.log: No such file or directory; name a text file"),
        (["http://127.0.0.1:1/metrics"], "http://127.0.0.1:1/metrics: [Errno 111] Connection refused"),
        (["{log}", "--path", "side"], "--path side: must be intra or inter"),
        (["{log}", "hw=1xh200", "--path", "inter", "backend=nvlink"], "backend=nvlink has no inter; set --path"),
        (["{crowd}"], "has no transfer of a pair alone; name a log, or a run with experiment.patterns=[pair]"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(words, message, tmp_path, pdsim_refuses):
    log, crowd, image = (tmp_path / name for name in ("decode.log", "crowd.csv", "image.log"))
    image.write_bytes(b"\x89PNG")
    log.write_text(PUBLIC)
    crowd.write_text("pattern,blocks,size,concurrency,seconds\nincast,1,4096,1,0.1\n")
    wire = Path(__file__).parent / "outputs" / "perftest.txt"
    typed = [word.format(log=log, crowd=crowd, wire=wire, image=image) for word in words]
    assert message in pdsim_refuses("diagnose", *typed)


needs_link = pytest.mark.skipif(bool(missing_requirements()), reason=f"needs a link: {missing_requirements()}")
POINTS = ["experiment=transfer", "experiment.patterns=[pair]", "experiment.order=shuffled", "--quiet"]


def ran(folder: Path, *words: str) -> Path:
    assert main(["run", "target=real", *words, *POINTS, f"output={folder}"]) == 0
    return next(folder.iterdir())


@needs_link
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MARKED if "shm" not in str(name)])
def test_known_link_slower_than_said_is_a_slow_wire(name, tmp_path, causes):
    sizes = ["experiment.blocks=[1,4]", "experiment.size=[262144,4194304]", "experiment.repeat=5"]
    run = str(ran(tmp_path, "hw=link", f"backend={name}", "hw.link.rate=500Mbps", "hw.link.delay=0.1ms", *sizes))
    said = causes(run, "hw.link.rate=4Gbps")
    assert next(iter(said)) == "slow wire"
    assert said["slow wire"][0] == pytest.approx(8.0, rel=0.4)
    assert causes(run)["as expected"][1] < said["as expected"][1] / 2


@pytest.mark.slow
def test_forced_tcp_is_told_from_shared_memory(tmp_path, causes):
    """A slow host, or one that polls late, slows copies through memory alike: one run is held against the other."""
    sizes = ["experiment.blocks=[1,4,32,256]", "experiment.size=[4096,65536]", "experiment.repeat=40"]
    unexplained = {}
    for name, options in (("nixl_shm", []), ("nixl_tcp", ["+backend.options.UCX_TLS=tcp"])):
        run = ran(tmp_path / name, "hw=loopback", f"backend={name}", *options, *sizes)
        assert main(["export", str(run), "--format", "nixlbench"]) == 0
        said = causes(str(run / "nixlbench-write-1.txt"), "hw=loopback", "backend=nixl_shm")
        unexplained[name] = said["over TCP"][1] / said["as expected"][1]
    assert unexplained["nixl_tcp"] < 0.7 * unexplained["nixl_shm"]
