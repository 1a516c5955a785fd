"""A real OpenAI-compatible server on the processor: llama.cpp's, with a tiny model of random weights."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.backends.live import tiny_server

START = 60.0
KEY = "tiny-key"


@dataclass
class Llama:
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def start(folder: Path, key: str = "", port: int = 0) -> Llama:
    port = port or free_port()
    command = [sys.executable, tiny_server.__file__, str(folder), str(port), key]
    with (folder / "server.log").open("wb") as log:
        server = Llama(f"http://127.0.0.1:{port}", subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and server.process.poll() is None:
        with suppress(OSError), urlopen(f"{server.url}/health") as answer:
            if answer.status == 200:
                return server
        time.sleep(0.1)
    server.kill()
    raise RuntimeError((folder / "server.log").read_text()[-1000:])


def needed() -> None:
    """Skip, or in CI fail, without the packages of the server."""
    missing = [name for name in ("xllamacpp", "gguf", "aiohttp") if find_spec(name) is None]
    if missing and not os.environ.get("PDSIM_REQUIRE_ENGINES"):
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A server that all tests share and none may stop."""
    needed()
    server = start(tmp_path_factory.mktemp("llama"))
    yield server
    server.kill()


@pytest.fixture
def make_llama(tmp_path):
    """Start servers of a test's own: ``make_llama(key=..., port=...)``."""
    needed()
    made: list[Llama] = []

    def make(key: str = "", port: int = 0) -> Llama:
        folder = tmp_path / f"llama{len(made)}"
        folder.mkdir()
        made.append(start(folder, key, port))
        return made[-1]

    yield make
    for one in made:
        one.kill()
