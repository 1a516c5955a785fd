"""A small machine, configuration and result that the tests of several rooms share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments import transfer
from pdsim.config import Config
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Gpu, Host, Interconnect, Machine, Nic
from pdsim.models.llm import Llm, Parallel, Side
from pdsim.results.record import Metric, Result, Table
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Outcome, RankResult

MACHINE = Machine(
    name="toy",
    vendor="nvidia",
    nodes=1,
    gpus=2,
    gpu=Gpu(name="small", memory=1 << 30, memory_rate=1e12, compute=1e14, pcie=50e9),
    interconnect=Interconnect(kind="switch", rate=10e9),
    nic=Nic(count=0, rate=0.0),
    host=Host(memory=1 << 34, memory_rate=1e11, tcp_rate=5e9, tcp_latency=20e-6),
    sources={"gpu.memory": "datasheet: of the card", "host.memory": "assumed: as in the shop"},
)
EIGHT = replace(MACHINE, gpus=8)
HOST = Host(memory=1 << 30, memory_rate=20e9, tcp_rate=3e9, tcp_latency=50e-6)
HOSTS = {"gpus": 0, "gpu": None, "interconnect": Interconnect(kind="none", rate=0.0)}
LOOPBACK = replace(MACHINE, name="loopback", vendor="cpu", host=HOST, **HOSTS)
"""This machine, as real engines on host memory are run on it."""

INTRA = EngineModel(path="nvlink", call=5e-6, descriptor=1e-6, overlap=False, latency=0.0)
BENCH = {"intra.call": "measured: on a bench"}
ENGINE = Engine(name="fast", implementation="fast", vendors=("nvidia",), intra=INTRA, inter=None, sources=BENCH)
LLM = Llm(name="tiny", parameters=1e6, active=1e6, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16)


def make_config(output: Path, **changes: Any) -> Config:
    """Return a configuration of `transfer` on `MACHINE` with *changes*; its results go to *output*."""
    values: dict[str, Any] = {
        "target": "model",
        "experiment": transfer.TransferOptions(size=(4096, 65536)),
        "hw": MACHINE,
        "backend": ENGINE,
        "model": LLM,
        "parallel": Parallel(prefill=Side(tp=1), decode=Side(tp=1)),
        "output": str(output),
    }
    return Config(**(values | changes))


def record(start: float = 0.0, status: str = "ok", label: str = "") -> TransferRecord:
    """A transfer of 16 blocks of 4096 bytes: 1 us prep, 2 us post, 10 us tx of which 4 us are polling."""
    times = [start + us * 1e-6 for us in (0, 1, 3, 9, 13)]
    return TransferRecord("toy-engine", "write", "rank0", "rank1", 65536, 16, *times, status, label)


def make_result(**changes: Any) -> Result:
    """Return a result of two transfers, one of them failed, with *changes*."""
    records = [record(), record(status="PeerLost")]
    values: dict[str, Any] = {
        "summary": [Metric("bw_gbs", 5.25, "bytes over time"), Metric("lat_p99_us", None, "99th percentile")],
        "tables": [
            Table("Points", {"pattern": "who sends to whom", "B/W": "GB/s"}, [["pair", 5.25], ["incast", None]])
        ],
        "transfers": records,
        "notes": ["the load [offered] is above capacity"],
        "outcome": Outcome({"rank0": RankResult("rank0", engine="toy-engine", transfers=records)}, seconds=0.5),
    }
    return Result(**(values | changes))
