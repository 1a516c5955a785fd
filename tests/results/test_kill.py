"""SIGKILL at any moment leaves a complete folder or one that is marked incomplete."""

import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from pdsim.results.store import FILES, INCOMPLETE, load

MOMENTS, SAVES, ROWS = 80, 4, 2000

# One process imports everything, then starts the victims: each saves runs without end, until it is killed.
PROGRAM = f"""
import os, signal, sys, time
from pathlib import Path
from pdsim.results.store import Run
from tests.support.configs import make_config, make_result, record

config, result = make_config(Path(sys.argv[1]) / "first"), make_result(transfers=[record()] * {ROWS})
Run(config).finish(result)  # imports what it needs
begin = time.monotonic()
Run(config).finish(result)
step = {SAVES} * (time.monotonic() - begin) / {MOMENTS}  # the kills are spread over so many saves, however slow
for moment in range({MOMENTS}):
    output = Path(sys.argv[1]) / str(moment)
    started, start = os.pipe()
    victim = os.fork()
    if not victim:
        config = make_config(output)
        os.write(start, b"!")
        while True:
            Run(config).finish(result)
    os.read(started, 1)
    time.sleep(moment * step)
    os.kill(victim, signal.SIGKILL)
    assert os.waitpid(victim, 0)[1] == signal.SIGKILL
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_no_folder_that_looks_complete_and_is_not(tmp_path):
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=100)
    folders = sorted(tmp_path.glob("*/*"))
    marked = [folder for folder in folders if folder.name.endswith(INCOMPLETE)]
    whole = [folder for folder in folders if folder not in marked]
    # without both kinds the kills came too early or too late to show anything
    assert len(marked) >= MOMENTS / 10
    assert len(whole) >= MOMENTS / 10
    for folder in whole:
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
        assert load(folder)["status"] == "ok"
        assert pq.read_metadata(folder / "transfers.parquet").num_rows == ROWS
        assert pq.read_metadata(folder / "requests.parquet").num_rows == 0
    states = {tuple(sorted(path.name for path in folder.iterdir())) for folder in marked}
    assert len(states) >= 3, "the kills all came at one stage of a save"
