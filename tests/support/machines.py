"""Small machines with round numbers, so that times can be worked out by hand."""

from collections.abc import Callable, Mapping
from typing import Any

from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Gpu, Host, Interconnect, Machine, Nic
from pdsim.sim.model import Model
from pdsim.transfer import Program
from pdsim.transfer.job import Outcome, Place, RankSpec


def machine(
    kind: str = "switch",
    nodes: int = 2,
    gpus: int = 4,
    cards: int = 2,
    vendor: str = "nvidia",
    latency: float = 0.0,
    **nic: Any,
) -> Machine:
    """Return nodes of GPUs: memory 1000 bytes/s, ports 100, PCIe 50, cards 20; host memory 400, TCP 1000 bytes/s.

    A node has two sockets; *nic* are further fields of its cards.
    """
    return Machine(
        name="test",
        vendor=vendor,
        nodes=nodes,
        gpus=gpus,
        gpu=Gpu(name="G", memory=4096, memory_rate=1000.0, compute=1.0, pcie=50.0) if gpus else None,
        interconnect=Interconnect(kind=kind, rate=100.0, latency=latency),
        nic=Nic(count=cards, rate=20.0, latency=latency, **nic),
        host=Host(memory=1 << 20, memory_rate=400.0, sockets=2, tcp_rate=1000.0, tcp_latency=0.5),
    )


def cost(path: str = "nvlink", **changes: Any) -> EngineModel:
    """Return an engine that posts in 1 s a call and 0.25 s a descriptor, then moves bytes, then takes 0.5 s."""
    values: dict[str, Any] = {"call": 1.0, "descriptor": 0.25, "overlap": False, "latency": 0.5}
    return EngineModel(path=path, **(values | changes))


def engine(intra: EngineModel | None = None, inter: EngineModel | None = None, timeout: float = 1000.0) -> Engine:
    """Return an engine called ``"test"``; without arguments, `cost` within a node and nothing across."""
    if intra is None and inter is None:
        intra = cost()
    return Engine(name="test", implementation="test", vendors=("nvidia",), intra=intra, inter=inter, timeout=timeout)


def run(
    *programs: tuple[Callable[..., Program], Mapping[str, Any]] | Callable[..., Program],
    model: Model | None = None,
    kill: Mapping[str, float] | None = None,
    restart: Mapping[str, float] | None = None,
    places: tuple[Place, ...] = (),
) -> Outcome:
    """Run each program as a rank of its own, named as it is, on GPU 0, 1, ... of node 0 unless *places* differs."""
    specs = []
    for index, entry in enumerate(programs):
        function, arguments = entry if isinstance(entry, tuple) else (entry, {})
        place = places[index] if places else Place(0, index)
        specs.append(RankSpec(function.__name__, f"{function.__module__}:{function.__name__}", place, arguments))
    return (model or Model(machine(), engine())).run(specs, kill, restart)
