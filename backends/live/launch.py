# SPDX-License-Identifier: Apache-2.0
"""Starts the servers of a deployment, waits until they answer, and ends every process that came of them.

Engines start children that outlive a killed parent and hold a GPU's memory, so a server leads a session of its own,
and what ends is every process of it. Should this process be killed, the kernel sends the servers SIGTERM.
`write_model` makes the folder of a model with dummy weights and a made-up tokenizer, from its configuration.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from backends.live.commands import ServerLaunch
from pdsim.core.errors import BackendUnavailable, ConfigError
from pdsim.models.llm import Llm

LINE = 300  # characters of a log's line that go into the error of a server that did not start
_ERROR = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Exit)\b: .*")
"""The last line of a traceback, wherever an engine's logger puts it."""

GRACE = 15.0  # seconds that servers have to end by themselves
_PR_SET_PDEATHSIG = 1


@contextmanager
def started(
    servers: Sequence[ServerLaunch], folder: Path, ready: float, say: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start *servers*, with a log each in *folder*, and yield their processes by name once all of them answer.

    On the way out all processes end. Raise a `BackendUnavailable`, with the first error in its log, if a server ends
    by itself or does not answer within *ready* seconds.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for server in servers:
            processes[server.name] = _start(server, folder)
        _await(servers, processes, folder, ready, say)
        yield processes
    finally:
        _stop(processes.values())


def _start(server: ServerLaunch, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"{server.name}.log").open("wb") as log:
        log.write(f"# {' '.join(server.command)}\n# {dict(server.environment)}\n".encode())
        log.flush()
        return subprocess.Popen(
            server.command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **server.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _await(
    servers: Sequence[ServerLaunch],
    processes: dict[str, subprocess.Popen[bytes]],
    folder: Path,
    ready: float,
    say: Callable[[str], None],
) -> None:
    # Raise a `BackendUnavailable`, with the reason from its log, for one that ends, or after *ready* seconds.
    began = time.monotonic()
    waiting = {server.name: server for server in servers}
    while waiting:
        passed = time.monotonic() - began
        say(f"waiting for {', '.join(waiting)} ({passed:.0f} s)")
        for name, server in list(waiting.items()):
            if (status := processes[name].poll()) is not None:
                raise BackendUnavailable(f"{name} ended with status {status}: {_reason(folder, name)}")
            if _answers(f"{server.url}/health"):
                del waiting[name]
        if waiting and passed > ready:
            name = next(iter(waiting))
            raise BackendUnavailable(
                f"{', '.join(waiting)} did not answer within live.ready={ready:g} s: {_reason(folder, name)}"
            )
        if waiting:
            time.sleep(0.5)


def _answers(url: str) -> bool:
    with suppress(HTTPException, OSError, ValueError), urlopen(url, timeout=5) as answer:  # noqa: S310
        return bool(answer.status == 200)
    return False


def _reason(folder: Path, name: str) -> str:
    log = folder / f"{name}.log"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    lines_of_errors = (line for line in lines[2:] if "WARNING" not in line)  # warnings quote errors to come
    error = next((match.group() for line in lines_of_errors if (match := _ERROR.search(line))), "")
    return f"{(error or lines[-1])[:LINE]} (all of it in {log})"


def _stop(processes: Collection[subprocess.Popen[bytes]]) -> None:
    # They get SIGTERM and `GRACE` seconds, then SIGKILL, for two seconds.
    sessions = {process.pid for process in processes}
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    force = time.monotonic() + GRACE
    while (left := _members(sessions, processes)) and time.monotonic() < force + 2.0:
        for pid in left if time.monotonic() > force else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


def _members(sessions: set[int], processes: Collection[subprocess.Popen[bytes]]) -> list[int]:
    for process in processes:
        process.poll()
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in sessions and fields[0] not in "ZX":
                members.append(int(entry.name))
    return members


def model_problem(model: Llm) -> str:
    """Return why *model* cannot be served with dummy weights, in one line, or nothing if it can."""
    if "architectures" in model.hf_config:
        return ""
    return (
        f"live.launch=true needs the architecture of model={model.name}, which conf/model/{model.name}.yaml "
        "does not name; add it there under hf_config, or choose a model that has it, such as model=qwen3-8b"
    )


def write_model(model: Llm, folder: Path) -> Path:
    """Write the folder of *model* and return it. Raise a `ConfigError` if the configuration has no `hf_config`."""
    if reason := model_problem(model):
        raise ConfigError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = int(model.hf_config["vocab_size"])
    _write(folder / "config.json", _config(model))
    _write(folder / "generation_config.json", {"do_sample": False})
    _write(folder / "tokenizer.json", _tokenizer(vocabulary))
    words = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.context, **words}
    _write(folder / "tokenizer_config.json", about)
    return folder


def _config(model: Llm) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32" if model.dtype_bytes == 4 else "bfloat16",
        **model.hf_config,
    }


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{n}": n for n in range(vocabulary)}, "unk_token": "t0"},
    }


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
