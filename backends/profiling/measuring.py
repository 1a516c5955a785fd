# SPDX-License-Identifier: Apache-2.0
"""One process of a measurement: ``python -m backends.profiling.measuring JOB.json RANK AFTER``.

It has one GPU, or the processor.  `backends.profiling.runner` writes the job.  Rows are appended as they come; a
case that cannot be measured is a line of the log with the reason.  A process that dies is started again behind the
case that it began last, which is why each case is announced before it runs, and each row is flushed.
"""

import csv
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backends.profiling.inventory import COLUMNS, TIMES, described
from backends.profiling.operators import DecoderStack, attend, build
from backends.profiling.stopwatch import Stopwatch, Timing


class _Measurer:
    """Measures cases one after the other, keeping the decoder of the last whole forward.

    Ranks that measure together take every decision that a clock could make differently on each by the largest value
    among them, so that all enter the same collectives.
    """

    def __init__(self, job: Mapping[str, Any], rank: int) -> None:
        self.device, self.rank, self.world = str(job["device"]), rank, int(job["world"])
        self._watch = Stopwatch(self.device, float(job["seconds"]), int(job["repeats"]), self._agree)
        self._together = False
        self._path = Path(f"{job['output']}-{rank}.csv")
        self._deadline = float(job["deadline"])
        self._decoder: DecoderStack | None = None
        self._kernels: dict[str, str] = {}

    def run(self, cases: list[dict[str, Any]]) -> None:
        new = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, [*COLUMNS, *TIMES], lineterminator="\n")
            if new:
                table.writeheader()
            for number, case in enumerate(cases):
                if self._agree(time.monotonic() - self._deadline) > 0.0:
                    _say(f"rank {self.rank}: out of time, {len(cases) - number} cases left")
                    return
                _say(f"case {case['number']} {described(case)}")
                if (timing := self._tried(case)) is not None:
                    values = {name: f"{value:.9g}" for name, value in timing._asdict().items()}
                    table.writerow({key: case[key] for key in COLUMNS if key in case} | values)
                    file.flush()

    def _tried(self, case: Mapping[str, Any]) -> Timing | None:
        try:
            return self._measured(case)
        except Exception as error:  # one kernel that is not there must not cost the others
            if "CUDA error" in str(error) or "device-side assert" in str(error):
                raise  # nothing works in this process any more
            _say(f"failed {described(case)}: {' '.join(str(error).split())[:300]}")
            return None
        finally:
            self._free()

    def _measured(self, case: Mapping[str, Any]) -> Timing:
        if case["operator"] in ("step", "forward"):
            calls: list[Callable[[], object]] = [self._whole(case)]
        else:
            self._decoder = None
            calls = self._collective(case) if case["operator"] == "allreduce" else build(case, self.device)
        return self._watch.eager(calls) if case["mode"] == "eager" else self._watch.graph(calls)

    def _whole(self, case: Mapping[str, Any]) -> Callable[[], object]:
        # It is built anew only if its shape differs from that of the case before.
        if self._decoder is None or self._decoder.key != DecoderStack.key_of(case):
            self._decoder = None
            self._free(share=0.0)
            self._decoder = DecoderStack(case, self.device)
        if not self._kernels:
            self._kernels = {"prefill": self._working(256), "decode": self._working(1)}
            _say(f"attention of whole forwards: {self._kernels}")
        return self._decoder.call(case, self._kernels)

    def _working(self, new: int) -> str:
        if self.device == "cpu":
            return "reference"
        for kernel in ("cudnn", "flash") if new > 1 else ("flash", "cudnn"):
            q, k, v = (torch.randn(1, rows, 8, 128, device="cuda").bfloat16() for rows in (new, 256, 256))
            try:
                attend(kernel, q, k[:, :, :2], v[:, :, :2])
                torch.cuda.synchronize()
            except Exception as error:  # another may be there
                _say(f"no {kernel} here: {str(error)[:200]}")
            else:
                return kernel
        return "reference"

    def _free(self, share: float = 0.5) -> None:
        if self.device != "cpu":
            total = torch.cuda.get_device_properties(0).total_memory
            if torch.cuda.memory_reserved() > share * total:
                torch.cuda.empty_cache()

    def _agree(self, value: float) -> float:
        if not self._together:
            return value
        shared = torch.tensor([value], device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return float(shared.item())

    def connect(self, path: str) -> None:
        if self.device != "cpu":
            torch.cuda.set_device(self.rank)
        kind, at = "gloo" if self.device == "cpu" else "nccl", f"file://{path}"
        dist.init_process_group(
            kind, init_method=at, rank=self.rank, world_size=self.world, timeout=timedelta(0, 60)
        )
        self._together = True

    def _collective(self, case: Mapping[str, Any]) -> list[Callable[[], object]]:
        # The same buffer is reduced eight times in a row: what a collective costs does not depend on its contents.
        size = int(case["tokens"]) * int(case["n"])
        if case["kernel"] == "nccl":
            x = torch.zeros(size, device=self.device, dtype=torch.bfloat16)
            return [lambda: dist.all_reduce(x)] * 8
        import torch.distributed._symmetric_memory as symmetric

        shared = symmetric.empty(size, device=self.device, dtype=torch.bfloat16).zero_()
        group = dist.group.WORLD.group_name
        symmetric.rendezvous(shared, group)
        if case["kernel"] == "two_shot":
            return [lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)] * 8
        return [lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group)] * 8


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 to the log


def main(words: list[str]) -> int:
    """Measure the job in the file that the first of *words* names, as the rank in the second.

    The third is the number of the case that it begins behind, -1 for none.  Cases that are no all-reduce are dealt
    out among the ranks; all-reduces are measured by all ranks together.
    """
    job = json.loads(Path(words[0]).read_text(encoding="utf-8"))
    rank, after = int(words[1]), int(words[2])
    torch.manual_seed(rank)
    if job["device"] == "cpu":
        torch.set_num_threads(1)  # so that it measures beside others
    worker = _Measurer(job, rank)
    together = [case for case in job["cases"] if case["operator"] == "allreduce"]
    cases = together or job["cases"][rank :: job["world"]]
    if together:
        worker.connect(job["meeting"])
    with torch.inference_mode():
        worker.run([case for case in cases if case["number"] > after])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
