"""The seeds of `experiments.reports`: what each report claims, where a claim fails, and the points kept."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments import handoff
from experiments.reports import figures, report_points
from experiments.reports.claims import Claim, ReportRun
from experiments.reports.figures import FIGURES, kept, simulated
from experiments.reports.report_points import ReportPoint, keep, loaded
from pdsim.config import Config, ExperimentOptions
from pdsim.config.compose import compose
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.files import data
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.sim.model import Model
from tests.experiments.test_handoff import configured as handing_over
from tests.support.composed import composed

HOST = ("hw=loopback", "memory=tracked")
PROMPTS = ("experiment.prompts=[8]", "experiment.prompt_tokens=256")
SMALL = {
    "intranode_metadata": ("experiment.tokens=[128,8192]", *PROMPTS),
    "nixl_staging": ("experiment.tokens=[512]", *PROMPTS),
    "symmetric_allgather": (
        "experiment.size=[64KiB,32MiB]", "experiment.batches=[[9,9],[4096,77,1000]]", "experiment.repeat=3",
    ),
    "mooncake_tcp": ("experiment.tokens=[512]", "experiment.repeat=2", "experiment.requests=4"),
    "mori_state": (
        "experiment.concurrency=[1,20]", "experiment.tokens=1024", "experiment.lengths=[512]",
        "experiment.tp=[2to1]", "experiment.repeat=2",
    ),
}  # fmt: skip


def configured(seed: str, *words: str) -> Config:
    config = compose([f"experiment=seed_{seed}", *SMALL[seed], *words])
    if seed != "mori_state":
        return config
    models = {"served": composed("model=tiny").model}
    if config.memory == "tracked":
        models["states"] = {"all": composed("model=tiny-hybrid").model}
    return replace(config, experiment=replace(config.experiment, **models))


def run(config: Config, target: Any = None) -> Result:
    model = Model(config.hw, config.backend, memory=config.memory, seed=config.seed, collective=config.collective)
    experiment = plugins.resolve(plugins.EXPERIMENTS, config.experiment.name)
    return experiment.run(config, target or model, silent)


@cache
def measured(seed: str, *words: str) -> Result:
    return run(configured(seed, *words))


def points(result: Result, claim: str, machine: str, target: str = "model") -> list[dict[str, Any]]:
    """Return what *result* says of *claim* on *machine*, and not what is committed of others; at least one point."""
    rows = result.rows("Points")
    own = [row for row in rows if (row["claim"], row["machine"], row["target"]) == (claim, machine, target)]
    assert own
    return own


def effects(result: Result, claim: str, machine: str) -> dict[str, Any]:
    return {row["at"]: row["effect"] for row in points(result, claim, machine)}


NVLINK = "8xh20 mooncake_nvlink"


def test_a_handoff_saves_a_tcp_message_and_pays_a_batch():
    result = measured("intranode_metadata")
    short, long = points(result, "handoff", NVLINK)
    for row in (short, long):
        assert row["before"] - row["after"] == pytest.approx(50 - 11 - 10 * 2.2, abs=0.5)  # us
    assert 1.05 > short["effect"] > long["effect"] > 1.0
    assert all(1.0 <= row["effect"] < 1.05 for row in points(result, "ttft", NVLINK))
    sent = {way: [r for r in result.transfers if r.label.startswith(f"{way} ")] for way in ("tcp", "nvlink")}
    rows, handoffs = 1600, 4 * (2 * (2 + 10) + 8)  # bytes of a request's rows to each of four decode ranks
    assert len(sent["nvlink"]) - len(sent["tcp"]) == handoffs
    assert sum(r.nbytes for r in sent["nvlink"]) - sum(r.nbytes for r in sent["tcp"]) == rows * handoffs


@pytest.mark.parametrize(
    ("seed", "tp", "machine", "note"),
    [
        ("intranode_metadata", "4to4", "2xh200 mooncake_nvlink", "prompts are served by ranks with a GPU each"),
        ("nixl_staging", "4to2", "2xh200 nixl", "hw=2xh200 has too few GPUs for 4toDP4, left out"),
    ],
)
def test_ranks_share_a_pair_of_gpus_if_asked_to(seed, tp, machine, note):
    result = measured(seed, "hw=2xh200", f"experiment.tp=[{tp}]", "experiment.placement=sides")
    assert all(at.startswith(tp) for at in effects(result, "handoff", machine))
    assert any(line.startswith(note) for line in result.notes)


def test_staging_saves_a_descriptor_a_token_and_plane():
    result, nixl = measured("nixl_staging", "experiment.tp=[1to4,4to1,4to8]"), "8xh20 nixl"
    # llama-3.1-70b; a block, and beside it ten rows of metadata to each decode rank
    sliced, staged = 80 * 2 * 512, 1
    counts = {row["at"]: (row["before"], row["after"]) for row in points(result, "descriptors", nixl)}
    assert counts["4to1 512 tokens"] == (4 * sliced + 10, 4 * staged + 10)
    assert counts["1to4 512 tokens"] == (4 * sliced + 40, 4 * staged + 40)
    handoffs = {row["at"]: row for row in points(result, "handoff", nixl)}
    assert min(row["effect"] for row in handoffs.values()) > 60
    assert handoffs["4to1 512 tokens"]["before"] >= 5 * sliced  # 5 us a descriptor, each rank for itself
    for claim in ("ttft", "throughput"):
        served = effects(result, claim, nixl)
        assert list(served) == ["4toDP4 8 prompts", "4toDP4EP4 8 prompts"]
        assert min(served.values()) > 1.05
    claims = [row for row in result.rows("Claims") if row["machine"] == nixl]
    assert [row["verdict"] for row in claims] == ["holds"] * 4
    assert "4to8 512 tokens" not in handoffs
    assert "hw=8xh20 has too few GPUs for 4to8, left out" in result.notes
    with pytest.raises(ConfigError, match=r"hw=2xh200 has too few GPUs for any of it; set experiment.placement=s"):
        measured("nixl_staging", "hw=2xh200", "experiment.tp=[4to2]", "experiment.placement=packed")


@pytest.mark.parametrize(("descriptor", "least", "most"), [("1.05us", 6.0, 65.0), ("0", 0.9, 10.0)])
def test_across_nodes_the_gain_is_that_of_descriptors_not_prepared(descriptor, least, most):
    words = ("hw=2x8xh20", "experiment.tp=[4to1,8to2]", f"experiment.descriptor={descriptor}")
    found = effects(measured("nixl_staging", *words), "handoff", "2x8xh20 nixl").values()
    assert all(least < effect < most for effect in found), found


def test_symmetric_memory_gathers_faster_until_its_pool_grows():
    result, nccl = measured("symmetric_allgather"), "8xh20 nccl"
    equal, padded = effects(result, "equal", nccl), effects(result, "padded", nccl)
    assert list(equal) == [f"{n} x {size}" for n in (2, 4, 8) for size in ("64 KiB", "32 MiB")]
    assert min(equal.values()) > 1.0
    assert equal["2 x 64 KiB"] > 1.05
    assert list(padded)[:2] == ["2 ranks, batch 9+9", "2 ranks, batch 4096+77+1000"]
    assert min(padded.values()) >= 1.0
    assert min(effects(result, "reserved", nccl).values()) > 1.05
    assert max(effects(result, "grown", nccl).values()) < 1.0
    assert any(note.startswith("a growth is made up for after ") for note in result.notes)
    both = effects(measured("symmetric_allgather", "kv.gather=both"), "reserved", nccl)
    assert both["8 x 32 MiB"] > 1.2 * effects(result, "reserved", nccl)["8 x 32 MiB"]  # the input's growth, too


def test_ranks_and_collectives_that_are_missing_are_named():
    four = ("hw=4xh200", "experiment.size=[64KiB]")
    notes = measured("symmetric_allgather", *four, "experiment.ranks=[2,4,8]").notes
    assert "hw=4xh200 has too few GPUs for 8 ranks, left out" in notes
    with pytest.raises(ConfigError, match=r"experiment.ranks=\[8\]: hw=4xh200 has 4 GPUs; take fewer ranks"):
        measured("symmetric_allgather", *four, "experiment.ranks=[8]")
    with pytest.raises(ConfigError, match="needs collectives; set collective=nccl, or gloo on hosts"):
        run(replace(configured("symmetric_allgather"), collective=None))


RDMA = "2x8xh20 mooncake"


def test_the_alias_moves_the_same_bytes_and_takes_longer():
    result = measured("mooncake_tcp")
    for claim in ("bytes", "descriptors"):
        assert list(effects(result, claim, RDMA).values()) == [1.0, 1.0]
    assert {record.engine for record in result.transfers} == {"model:mooncake", "model:mooncake_tcp"}
    handoffs = effects(result, "handoff", RDMA)
    assert list(handoffs) == ["1to1 512 tokens", "8to8 512 tokens"]
    assert min(handoffs.values()) > 4


@pytest.mark.parametrize("hw", ["loopback", "link"])
def test_without_rdma_there_is_no_before_and_all_handoffs_succeed(hw):
    result = measured("mooncake_tcp", f"hw={hw}")
    assert [(row["before"], row["after"]) for row in points(result, "serves", f"{hw} mooncake_tcp")] == [(2, 2)]
    (row,) = points(result, "handoff", f"{hw} mooncake_tcp")
    assert (row["before"], row["effect"]) == (None, None)
    assert result.failures == []


def test_inline_posting_serves_less_where_posts_outlast_forwards():
    result, mori = measured("mori_state"), "2x8xmi300x mori"
    many = "20 requests of 1024 tokens"
    assert 0.8 < effects(result, "throughput", mori)[many] < 0.95
    assert effects(result, "drain", mori)[many] == pytest.approx(1.0, rel=1e-3)
    seen = effects(result, "seen", mori)  # what is polled is seen later once another forward runs
    assert seen["1 requests of 1024 tokens"] == pytest.approx(1.0, rel=0.02)
    assert seen[many] > 1.5
    waiting = effects(measured("mori_state", "experiment.handover=1ms"), "throughput", mori)
    assert waiting[many] > 1.05  # the one worker waits for the lock before each write
    overlapping = measured("mori_state", "hw=loopback", "scheduler.chunk=8192")
    assert effects(overlapping, "drain", "loopback mooncake_tcp")[many] > 1.3  # calls of an engine overlap


def test_state_and_slices_cost_time():
    result = measured("mori_state", *HOST, "experiment.concurrency=[1]")
    for claim in ("state", "slices"):
        assert list(effects(result, claim, "loopback mooncake_tcp").values()) == [1]
    assert min(row["times"] for row in result.rows("What it costs")) > 1.0


LESS, MORE = Claim("fast", "it is faster", "us"), Claim("much", "it moves more", "GB/s", better="more", bound=2.0)


@pytest.mark.parametrize(
    ("claim", "before", "after", "effect"),
    [(LESS, 3.0, 2.0, 1.5), (MORE, 2.0, 3.0, 1.5), (LESS, 3.0, None, None), (LESS, 0.0, 1.0, None)],
)
def test_an_effect_is_how_many_times_better_the_change_is(claim, before, after, effect):
    assert claim.effect(ReportPoint(claim.name, "toy", "model", "", before, after)) == effect


@dataclass(frozen=True, kw_only=True)
class Toy(ExperimentOptions):
    name: str = "seed_toy"


@pytest.fixture
def toy_file(monkeypatch, tmp_path):
    (tmp_path / "reports").mkdir()
    monkeypatch.setattr(report_points, "data", lambda *parts: tmp_path.joinpath(*parts))
    return tmp_path / "reports" / "seed_toy.csv"


def test_claims_stand_beside_what_was_measured_and_kept(toy_file):
    rows = "fast,toy fast,real,1to1 64 tokens,3.0,3.0\nfast,toy fast,model,old,9,1\nfast,other,real,x,,1.0\n"
    toy_file.write_text(f"# measured on a toy\nclaim,machine,target,at,before,after\n{rows}")
    config = replace(handing_over(tp=("1to1",), tokens=(64,)), experiment=Toy())
    trial = ReportRun(config, Model(config.hw, config.backend, memory="tracked"), silent, 1)
    (row,) = trial.run("whole", handoff.HandoffOptions(tp=("1to1",), tokens=(64,), repeat=2)).rows("Handoffs")
    trial.add(LESS, "1to1 64 tokens", 2 * row["p50"], row["p50"])
    result = trial.result([LESS, MORE])
    names = ("machine", "simulated", "measured", "verdict")
    assert [tuple(map(each.get, names)) for each in result.rows("Claims")] == [
        ("toy fast", "2", "1", "does not hold"), ("other", None, None, "-"),
    ]  # fmt: skip
    assert "old" not in {each["at"] for each in result.rows("Points")}
    spans = {"fast_least": 2.0, "fast_most": 2.0, "much_least": None, "much_most": None}
    assert result.values == spans
    assert {record.label.partition(" ")[0] for record in result.transfers} == {"whole"}


FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reports"
COMMAND = re.compile(r"^# [^:]+, model: .*; pdsim run (.*)$", re.MULTILINE)
SIMULATED = [
    (file.stem, command)
    for file in sorted(data("reports").glob("seed_*.csv"))
    for command in COMMAND.findall(file.read_text(encoding="utf-8"))
]


def test_the_data_has_every_figure():
    assert [row[:3] for row in kept()] == [(f.report, f.says, round(f.reported, 2)) for f in FIGURES]
    config = composed("experiment=report_figures", "+experiment.only=[9149]")
    result = figures.run(config, Model(config.hw, config.backend), silent)
    assert [metric.value for metric in result.summary] == [1, 0, 1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "report",
    ["9149", *(pytest.param(each, marks=pytest.mark.slow) for each in ("7236", "22536", "26406", "37766", "6860"))],
)
def test_the_data_has_a_figure_as_the_model_has_it(report):
    config = composed("experiment=report_figures", f"+experiment.only=[{report}]")
    assert list(simulated(config, silent)) == [row for row in kept() if row.report == f"#{report}"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "command"), SIMULATED)
def test_a_command_simulates_the_points_kept_of_it(seed, command, tmp_path, pdsim_says):
    def lines(text: str) -> list[str]:
        return sorted(line for line in text.splitlines() if not line.startswith("#"))

    status, _, stderr = pdsim_says("run", *command.split(), f"output={tmp_path}")
    assert status == 0, stderr
    (folder,) = tmp_path.glob("seed_*")
    assert lines(keep([loaded(folder)])[seed]) == lines(data("reports", f"{seed}.csv").read_text(encoding="utf-8"))
