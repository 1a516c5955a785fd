# SPDX-License-Identifier: Apache-2.0
"""Sweeps that are killed, and what a sweep costs around its simulations.

``python -m benchmarks.sweeps kills`` runs one sweep undisturbed and the same one killed at random moments, resumed
each time by the same command, and compares: every point once, equal tables.  With ``--executor ray`` a worker of Ray
is killed, too.  ``python -m benchmarks.sweeps overhead`` prints the processor's time of a point beside that of its
simulation alone.  ``python -m benchmarks.sweeps interruptions`` ends commands by SIGINT, SIGTERM and SIGKILL at
random moments and looks at what they left.  Each exits with 1 if what must hold does not.  The moments are drawn
from ``--seed``; what they meet depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq

PATIENCE = 3600.0
"""Seconds after which a sweep that does not end is given up."""
POINT = ("workload=poisson", "workload.rate=6", "workload.count=80")
"""What a point simulates: about 0.05 s of one core."""


def command(count: int, executor: Sequence[str]) -> list[str]:
    """Return a sweep of *count* points, of which half have another layout."""
    words = [*POINT, "parallel=tp2,tp4", f"seed=range({count // 2})", "--quiet", *executor]
    return [sys.executable, "-m", "pdsim", "sweep", *words]


def only(folder: Path) -> Path:
    """Return the folder of the one sweep in *folder*."""
    (sweep,) = folder.glob("results/sweep-*")
    return sweep


def rows(folder: Path) -> list[str]:
    """Return the names of the points that a sweep in *folder* has appended, in order."""
    ledgers = list(folder.glob("results/sweep-*/points.jsonl"))
    lines = ledgers[0].read_bytes().split(b"\n")[:-1] if ledgers else []
    return [point["point"] for point in map(json.loads, lines) if "point" in point]


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the processes below *pid* and their command lines."""
    children = f"/proc/{pid}/task/{pid}/children"
    try:
        below = [int(word) for word in Path(children).read_text().split()]
    except OSError:  # it has ended
        return
    for child in below:
        try:
            yield child, Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        yield from descendants(child)


def until(process: subprocess.Popen[bytes], folder: Path, count: int) -> bool:
    """Wait until *count* points are appended; return false if the sweep ended before."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None:
        if len(rows(folder)) >= count:
            return True
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"no progress: {len(rows(folder))} points in {PATIENCE:g} s")
        time.sleep(0.2)
    return False


def kills(count: int, times: int, executor: Sequence[str], seed: int, folder: Path) -> bool:
    """Run the sweep undisturbed and killed, print what was seen, and return whether both have one table."""
    whole, killed = folder / "whole", folder / "killed"
    for each in (whole, killed):
        each.mkdir(parents=True)
    chance, words, total = random.Random(seed), command(count, executor), count // 2 * 2
    began = time.monotonic()
    subprocess.run(command(count, ()), cwd=whole, check=True, timeout=PATIENCE)
    print(f"undisturbed: {total} points in {time.monotonic() - began:.0f} s", flush=True)
    for number, least in enumerate(sorted(chance.sample(range(total // 20, total * 19 // 20), times)), 1):
        process = subprocess.Popen(words, cwd=killed, start_new_session=True)
        if not until(process, killed, least):
            raise SystemExit("the sweep ended before it was killed")
        if "executor=ray" in executor:
            _kill_a_worker(process.pid, chance)
            until(process, killed, least + 10)
        process.kill()
        process.wait()
        print(f"SIGKILL {number} of {times}: {len(rows(killed))} points were kept", flush=True)
        time.sleep(2.0)  # Ray's processes see that their driver is gone
    subprocess.run(words, cwd=killed, check=True, timeout=PATIENCE)
    names = rows(killed)
    tables = [pq.read_table(only(each) / "points.parquet") for each in (whole, killed)]
    once, same = len(names) == len(set(names)) == total, tables[0].equals(tables[1])
    left = [path.name for path in only(killed).glob("*.incomplete")]
    ended = sorted(set(tables[1]["status"].to_pylist()))
    print(
        f"every point once: {once} ({len(names)} rows); the same table: {same}; status {ended}; unfinished: {left}"
    )
    return once and same and not left


def _kill_a_worker(driver: int, chance: random.Random) -> None:
    workers = [pid for pid, line in descendants(driver) if line.startswith("ray::_chunk")]
    if workers:
        pid = chance.choice(workers)
        os.kill(pid, signal.SIGKILL)
        print(f"a worker of Ray was killed ({len(workers)} were at work)", flush=True)


def overhead(count: int, folder: Path) -> bool:
    """Print the processor's seconds of a point of a sweep and of its simulation, and return whether 1.1 is kept."""
    from pdsim.config.compose import compose
    from pdsim.run import simulated

    def simulation(seeds: range) -> float:
        configs = [compose([*POINT, f"seed={seed}"]) for seed in seeds]
        simulated(configs[0])  # imports
        began = time.process_time()
        for config in configs:
            simulated(config)
        return (time.process_time() - began) / len(configs)

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    print(f"{'points':>7}{'simulation ms':>15}{'point ms':>10}{'factor':>8}")
    before = simulation(range(50))
    began, wall = cpu(), time.monotonic()
    subprocess.run(command(count, ()), cwd=folder, check=True, timeout=PATIENCE)
    points = count // 2 * 2
    spent, wall = (cpu() - began) / points, time.monotonic() - wall
    alone = (before + simulation(range(50))) / 2
    print(f"{points:>7}{1e3 * alone:>15.1f}{1e3 * spent:>10.1f}{spent / alone:>8.2f}   ({wall:.0f} s)")
    return spent / alone <= 1.1


COMMANDS = (
    ("run", "workload=poisson", "workload.count=3000", "workload.rate=6"),
    ("sweep", *POINT, "seed=range(40)", "executor.workers=2"),
    ("report", "KEPT"),
    ("explain", "KEPT"),
    ("compare", "KEPT", "KEPT"),
    ("run", "--json", "workload.count=30"),
)
"""What is interrupted, in turns; KEPT is the folder of a complete run."""
_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}


def interruptions(times: int, seed: int, folder: Path) -> bool:
    """Interrupt commands at random moments, print what each left, and return whether all was as it must be.

    A command ends with its result, or with the status of the signal and one line at most; what it wrote is complete,
    or marked incomplete, and a sweep goes on by the same command.
    """
    chance, good = random.Random(seed), True
    call = [sys.executable, "-m", "pdsim"]
    subprocess.run(
        [*call, "run", "workload.count=20", "--quiet", "output=kept"], cwd=folder, check=True, timeout=600
    )
    (kept,) = (folder / "kept").iterdir()
    for number in range(times):
        words = [str(kept) if word == "KEPT" else word for word in COMMANDS[number % len(COMMANDS)]]
        sent = list(_STATUS)[(number + number // len(COMMANDS)) % 3]  # each command meets each signal
        here = folder / f"run{number}"
        here.mkdir()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*call, *words], cwd=here, text=True, **pipes)  # type: ignore[call-overload]
        wait = chance.uniform(0.05, 2.0)
        try:
            out, err = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            process.send_signal(sent)
            out, err = process.communicate(timeout=120)
        problems = _problems(process.returncode, sent, out, err, here, words)
        good = good and not problems
        said = "; ".join(problems) or "as it must be"
        print(
            f"{number:>3} {sent.name:<8}after {wait:4.1f} s {words[0]:<8}status {process.returncode:>4}  {said}",
            flush=True,
        )
    return good


def _problems(
    status: int, sent: signal.Signals, out: str, err: str, folder: Path, words: Sequence[str]
) -> list[str]:
    if "KeyboardInterrupt" in err and "/pdsim/cli/" not in err:
        return []  # Python itself was still starting, and says so in its own way
    lines = [line for line in err.splitlines() if not line.startswith(("sweep ", "serve ")) and line]
    problems = []
    at_an_end = status == -sent == -signal.SIGTERM and not err  # while Python itself began or ended
    if status not in (0, _STATUS[sent]) and not at_an_end:
        problems.append(f"status {status}")
    if "Traceback" in err + out or len(lines) > 1:
        problems.append(f"said {len(lines)} lines: {lines[-1][:80] if lines else ''}")
    if status and "--json" in words and out:
        problems.append("half an answer")
    for run in [*folder.glob("results/*"), *folder.glob("results/sweep-*/*")]:
        whole = run.name.startswith("sweep-") or (run / "summary.json").is_file()
        if run.is_dir() and not whole and not run.name.endswith(".incomplete"):
            problems.append(f"{run.name} is neither complete nor marked")
        if run.name.endswith(".part"):
            problems.append(f"{run.name} was left")
    if words[0] == "sweep" and status:
        again = subprocess.run([sys.executable, "-m", "pdsim", *words, "-q"], cwd=folder, check=False, timeout=600)
        names = rows(folder)
        if again.returncode or len(names) != len(set(names)) or len(names) != 40:
            problems.append(f"resumed to {len(names)} rows, status {again.returncode}")
    return problems


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "overhead", "interruptions"))
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--times", type=int, default=20, help="of interruptions")
    parser.add_argument("--executor", default="local")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.what == "overhead":
            return 0 if overhead(asked.points, folder) else 1
        if asked.what == "interruptions":
            return 0 if interruptions(asked.times, asked.seed, folder) else 1
        executor = [] if asked.executor == "local" else [f"executor={asked.executor}"]
        return 0 if kills(asked.points, asked.kills, executor, asked.seed, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
