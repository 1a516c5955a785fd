"""What `backends.engines.mori` takes from MORI's wheel is there, under these names and with these arguments.

On GPU memory and over xGMI, where nothing has been run, this is all that is known.
"""

import json
import os
import subprocess

import pytest

from backends.emulation.guest import mori as space
from pdsim.core.errors import BackendUnavailable
from pdsim.testing.cases import unavailable

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

LOOK = """
import inspect, json
import mori
from mori import cpp, io

def members(cls):
    return sorted(name for name in vars(cls) if not name.startswith("_"))

def arguments(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]

def keywords(cls):
    text = cls.__init__.__doc__.partition("(")[2].rpartition(")")[0]
    return [part.partition(":")[0] for part in text.split(", ")][1:]

engine = io.IOEngine("a", io.IOEngineConfig("127.0.0.1", 0))
engine.create_backend(io.BackendType.XGMI, io.XgmiBackendConfig())
memory = engine.register_memory(4096, 8192, -1, io.MemoryLocationType.CPU)
again = io.MemoryDesc.unpack(memory.pack())
engine.register_remote_engine(io.EngineDesc.unpack(engine.get_engine_desc().pack()))
try:
    engine.create_backend(io.BackendType.RDMA, io.RdmaBackendConfig())
except RuntimeError as error:
    refused = str(error)
print(json.dumps({
    "version": mori.__version__,
    "engine": {name: arguments(getattr(io.IOEngine, name)) for name in members(io.IOEngine)},
    "session": members(io.IOEngineSession),
    "status": members(cpp.TransferStatus),
    "rdma": keywords(io.RdmaBackendConfig),
    "xgmi": keywords(io.XgmiBackendConfig),
    "backends": sorted(io.BackendType.__members__),
    "places": sorted(io.MemoryLocationType.__members__),
    "failures": sorted(io.PeerFailureReason.__members__),
    "failure": members(io.PeerFailureEvent),
    "memory": [again.data, again.size, again.id, again == memory],
    "failed": engine.pop_peer_failure() is not None,
    "refused": refused,
}))
"""


@pytest.fixture(scope="module")
def wheel():
    """What the wheel says of itself, in the Python that loads it."""
    try:
        python, _ = space.python()
    except BackendUnavailable as error:
        unavailable(error)
    environment = {**os.environ, "MORI_DISABLE_AUTO_XGMI": "1", "MORI_IO_LOG_LEVEL": "off"}
    return json.loads(subprocess.check_output([python, "-c", LOOK], timeout=120, env=environment).splitlines()[-1])


def test_the_wheel_takes_and_has_what_the_adapter_uses(wheel):
    assert wheel["version"] == "1.2.4"
    given = {
        "allocate_transfer_uid": "",
        "create_backend": "type config",
        "create_session": "local_mem remote_mem",
        "deregister_memory": "mem_desc",
        "get_engine_desc": "",
        "pop_peer_failure": "",
        "register_memory": "ptr size device_id mem_loc",
        "register_remote_engine": "engine_desc",
    }
    assert {name: wheel["engine"][name] for name in given} == {name: words.split() for name, words in given.items()}
    parts = {
        "session": "batch_read batch_write",
        "status": "Code InProgress Message Succeeded",
        "failure": "detail reason remote_engine_key",
        "failures": "PEER_UNREACHABLE",
        "backends": "RDMA XGMI",
        "places": "CPU GPU",
        "rdma": "qp_per_transfer num_worker_threads enable_notification enable_transfer_chunking chunk_bytes",
        "xgmi": "num_streams num_events",
    }
    assert [word for name, words in parts.items() for word in words.split() if word not in wheel[name]] == []
    assert (wheel["memory"], wheel["failed"]) == ([4096, 8192, 0, True], False)  # descriptions survive
    assert wheel["refused"].startswith("no active RDMA device on this host")
