# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of the documentation: ``python -m tools.reference``.

docs/configuration.md is built whole and not committed: `tools/configuration.md`, then every configuration key with
its type, default and meaning, from the dataclasses that type it.  ``python -m tools.reference FOLDER`` writes only
this page, into FOLDER.

The other parts stand each between two HTML comments of their page:

- docs/reports.md: claims of reports, from `data/reports`, and metadata, from `data/benchmarks`.
- docs/results.md: every column of the Parquet files, from `pdsim.results.schema`.
- docs/reliability.md: what was found under faults on real engines, from `data/benchmarks/faults_real.csv`, and
  the laws of simulation; docs/faults.md: the kinds of faults and the invariants.
- docs/validation.md and data/validation/README.md: what `tools.validation` says, figures of
  reports, and big models.
- docs/validation.md: whole servers beside AISimulate, from `data/benchmarks/scorecard.csv`; intervals, from
  `tools.transferred` and `tools.served`, which writes data/live/README.md, too.
- docs/deployments.md: flags of serving engines, from `pdsim.recipes`.
- docs/performance.md: CPU time beside AISimulate, from `data/benchmarks/peers.csv`.
- README.md: the output of its first command and what staging changes, on the model, where one seed gives the same
  output on every machine.

`tests/test_docs.py` compares all of them with what is written.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from experiments.faults.scenario import KINDS as KINDS_OF_FAULTS
from experiments.reports import intranode_metadata, mooncake_tcp, mori_state, nixl_staging, symmetric_allgather
from experiments.reports.claims import Claim, effect_range
from experiments.reports.figures import FigureRow, kept
from experiments.reports.report_points import ReportPoint, committed
from pdsim.config import Config, ExperimentOptions, keys
from pdsim.config.keys import Key
from pdsim.core import plugins
from pdsim.core.errors import dataclasses_in
from pdsim.core.files import data
from pdsim.kv.policy import Policy
from pdsim.recipes import known
from pdsim.results.schema import INSTANTS, LIVE, OPTIONAL, REQUESTS, SAMPLES, TRANSFERS, Column
from pdsim.verify.invariants import INVARIANTS
from pdsim.verify.laws import LAWS
from tools import faults_model, faults_real, scorecard, served, transferred, validation
from tools.big_models import CAUSES
from tools.tables import markdown, rows

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("time", "size", "rate")
ELSEWHERE = ("experiment", "policy", "calibration", "sources")
"""Fields without rows: experiments and policies have sections of their own, the others are written by programs."""
HEAD = ("| key | type | default | meaning |", "|---|---|---|---|")
FIRST = ("hw=2x8xh200", "parallel.prefill.tp=4", "workload.speed=0.25")
OUTPUT_LINES = 16
WITH_STAGING = (
    "Ranks of TP4 and TP8 hold different heads, so each token and layer is a write of its own: links idle while a\n"
    "thread posts. With `kv.staging=true` ranks gather heads first:"
)
SEEDS = (nixl_staging, intranode_metadata, symmetric_allgather, mori_state, mooncake_tcp)


def configuration() -> Iterator[str]:
    """Yield the tables of docs/configuration.md."""
    groups: dict[str, list[str]] = {}
    for cls, names in _classes().items():
        if rows := [_row(key, names) for key in keys.of(cls, names[0], within=False)]:
            groups.setdefault(names[0].partition(".")[0], []).extend(rows)
    for group in sorted(groups):
        yield from (f"### `{group}`" if group else "### Keys without a group", "", *HEAD, *groups[group], "")
    for name in plugins.names(plugins.EXPERIMENTS):
        if name.startswith("seed_"):
            continue  # docs/reports.md
        options = ExperimentOptions.class_for({"name": name})
        yield from (f"### `experiment={name}`", "", *HEAD, *(_row(key, ["experiment"]) for key in _own(options)), "")


def flags() -> Iterator[str]:
    """Yield the table of docs/deployments.md: the key that each flag of vLLM and SGLang decides."""
    by_key: dict[str, list[str]] = {}
    for flag, key in (known()["vllm"] | known()["sglang"] | known()["dynamo"]).items():
        if key:
            by_key.setdefault(key, []).append(f"`--{flag}`")
    yield from markdown(("flags", "key"), [(", ".join(each), f"`{key}`") for key, each in sorted(by_key.items())])


def peers() -> Iterator[str]:
    """Yield the table of docs/performance.md: what simulators of one job took, measured in one run."""
    heads = ("simulator", "CPU s", "requests", "TTFT p50, ms", "TPOT p50, ms")
    yield from markdown(heads, [tuple(row.values()) for row in rows(data("benchmarks", "peers.csv"))])


def _own(options: type) -> Iterator[Key]:
    return (key for key in keys.of(options, "experiment") if key.name != "experiment.name")


def columns() -> Iterator[str]:
    """Yield the lines of the tables of docs/results.md."""
    tables = (
        *(("`transfers.parquet`", TRANSFERS), ("`requests.parquet`", REQUESTS)),
        *(
            ("`target=model` and `real` add", INSTANTS),
            ("`cache=` and `workload.priority` add", OPTIONAL),
            ("`target=live` adds", LIVE),
            ("`samples.parquet`", SAMPLES),
        ),
    )
    for name, of in tables:
        yield f"### {name}"
        yield ""
        yield from _columns(of)


def output() -> Iterator[str]:
    """Yield the lines of the blocks in README.md: a modelled run, and where TTFT goes with staging.

    The time in the folder's name is left out.
    """
    yield "```text"
    yield from _printed()[:OUTPUT_LINES]
    yield from ("```", "", WITH_STAGING, "")
    yield "```text"
    yield from (line for line in _printed("kv.staging=true") if line.startswith(("SLO: ", "TTFT: ")))
    yield "```"


def _printed(*more: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pdsim", "run", *FIRST, *more]
        environment = {**os.environ, "COLUMNS": "120"}
        printed = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True
        ).stdout
    lines = (re.sub(r"-\d{8}-\d{6}", "-DATE-TIME", line).rstrip() for line in printed.splitlines())
    return [line.replace(sys.executable, ".venv/bin/python") for line in lines]


def claims() -> Iterator[str]:
    """Yield the table of docs/reports.md of what the five seeds claim, by the runs that data/reports keeps."""
    rows = []
    for seed in SEEDS:
        name = seed.__name__.rpartition(".")[2]
        points = committed(f"seed_{name}")
        for claim in seed.CLAIMS:
            own = [point for point in points if point.claim == claim.name]
            machines = dict.fromkeys(point.machine for point in own)
            if claim.better == "same":  # on any machine
                cells = ["all: " + _factors(claim, own)]
            else:
                grouped = {machine: [point for point in own if point.machine == machine] for machine in machines}
                cells = [f"{machine}: {_factors(claim, those)}" for machine, those in grouped.items()]
            cells = [cell for cell in cells if not cell.endswith(": -")]
            if cells:
                rows.append((f"{name} {claim.name}", "<br>".join(cells)))
    yield from markdown(("report, claim", "hw backend: simulated; measured"), rows)


def _factors(claim: Claim, points: Sequence[ReportPoint]) -> str:
    model, real = (effect_range(claim, points, target) for target in ("model", "real"))
    return "; ".join([model or "-", *([real] if real else [])]).replace(" to ", "-")


def metadata() -> Iterator[str]:
    """Yield the table of docs/reports.md of metadata over NVLink against TCP, predicted and measured on 2 x H100."""
    predicted = {
        (row["tp"], row["tokens"], row["metadata"]): float(row["handoff_us"])
        for row in rows(data("benchmarks", "metadata-2xh100-predicted.csv"))
        if row["hw"].startswith("hw=8xh100")
    }
    jobs: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows(data("benchmarks", "metadata-2xh100.csv")):
        jobs.setdefault((row["tp"], row["tokens"], row["metadata"]), {})[row["round"]] = float(row["handoff_us"])
    lines = []
    for tp, tokens in dict.fromkeys(key[:2] for key in predicted):
        cells, control = [], jobs[tp, tokens, "control"]
        for way in ("write", "batch"):
            own = jobs.get((tp, tokens, way), {})
            factors = [us / own[turn] for turn, us in control.items() if turn in own]
            model = predicted[tp, tokens, "control"] / predicted[tp, tokens, way]
            cells.append(f"{model:.3g}; {median(factors):.3g} ({min(factors):.3g}-{max(factors):.3g})")
        lines.append((f"{tp}, {tokens}", *cells))
    yield from markdown(("ranks, tokens", "a write of its own", "in the last batch of KV"), lines)
    yield ""
    behind, alone = _behind_another_rank("134217728")
    yield (
        f"At 2,048 tokens a write of metadata takes {behind:.0f} µs while the other rank's KV is under way, else "
        f"{alone:.0f}."
    )


def _behind_another_rank(nbytes: str) -> list[float]:
    # Median us of metadata posted while the KV of the other rank of its GPU is on the wire, and of the rest.
    handoffs: dict[tuple[str, str], dict[tuple[str, str], dict[str, str]]] = {}
    for row in rows(data("benchmarks", "metadata-2xh100.parquet")):
        handoffs.setdefault((row["round"], row["request"]), {})[row["path"], row["source"]] = row
    times: dict[bool, list[float]] = {True: [], False: []}
    for writes in handoffs.values():
        for (path, source), row in writes.items():
            (other,) = (kv for at, kv in writes.items() if at[0] == "grouped" and at[1] != source)
            if path == "metadata" and other["nbytes"] == nbytes:
                begin, end = float(row["submitted"]), float(row["completed"])
                times[float(other["posted"]) < begin < float(other["completed"])].append(end - begin)
    return [median(times[behind]) for behind in (True, False)]


def figures() -> Iterator[str]:
    """Yield the lines of the table of docs/validation.md; figures of several numbers of prompts are one line."""
    lines = []
    words = {"reached": "reached", "within what is open": "open", "not reached": "missed"}
    groups: dict[str, list[FigureRow]] = {}
    for row in kept():
        groups.setdefault(re.sub(r"TTFT of \d+ prompts?", "TTFT", f"{row.report} {row.figure}"), []).append(row)
    for figure, own in groups.items():
        counts = [match[1] for row in own if (match := re.search(r"TTFT of (\d+) prompt", row.figure))]
        of = f"; {', '.join(counts)} prompts" if counts else ""
        model = [f"{r.simulated:.3g} ({r.lowest:.3g}-{r.highest:.3g}) {words[r.verdict]}" for r in own]
        lines.append((f"{figure}{of}", ", ".join(f"{row.reported:.3g}" for row in own), "; ".join(model)))
    yield from markdown(("figure, a factor", "reported", "simulated (interval) verdict"), lines)


def big_models() -> Iterator[str]:
    """Yield the table of docs/validation.md on models whose experts lie on many nodes."""
    rows = []
    with data("reports", "big_models.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            told, modelled, hidden = (float(row[name]) for name in ("published", "modelled", "exchange hidden"))
            numbers = f"{told:,.0f}", f"{modelled:,.0f}", f"{modelled / told - 1:+.0%}", f"{hidden:,.0f}"
            rows.append((row["source"], row["side"], *numbers))
    heads = ("deployment", "side", "published, tokens/s a node", "modelled", "error", "all of the exchange hidden")
    yield from markdown(heads, rows)
    yield ""
    for name, cause in CAUSES.items():
        yield from textwrap.wrap(f"- {name}: {cause}", 116, subsequent_indent="  ", break_on_hyphens=False)


PARTS: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "faults-real": ("docs/reliability.md", faults_real.table),
    "faults-model": ("docs/reliability.md", faults_model.table),
    "kinds": ("docs/faults.md", lambda: markdown(("kind", "effect"), KINDS_OF_FAULTS.items())),
    "invariants": ("docs/faults.md", lambda: markdown(("invariant", "rule"), INVARIANTS.items())),
    "reached": ("docs/faults.md", faults_model.least),
    "laws": ("docs/reliability.md", lambda: markdown(("law", "rule"), LAWS.items())),
    "columns": ("docs/results.md", columns),
    "claims": ("docs/reports.md", claims),
    "metadata": ("docs/reports.md", metadata),
    "scorecard": ("docs/validation.md", scorecard.table),
    "served": ("docs/validation.md", served.table),
    "kinds of servers": ("data/live/README.md", served.kinds),
    "figures": ("docs/validation.md", figures),
    "big models": ("docs/validation.md", big_models),
    "transfers": ("docs/validation.md", validation.transfers),
    "transferred": ("docs/validation.md", transferred.table),
    "serving engines": ("docs/validation.md", validation.serving),
    "list": ("data/validation/README.md", validation.provenance),
    "flags": ("docs/deployments.md", flags),
    "output": ("README.md", output),
    "peers": ("docs/performance.md", peers),
}


def rewritten(part: str) -> str:
    """Return the page that has *part*, one of `PARTS`, with that part as it is now.

    Raise a `ValueError` if the page lacks one of the two comments ``<!-- generated PART ... -->`` and
    ``<!-- end of PART -->``.
    """
    page, lines = PARTS[part]
    text = (ROOT / page).read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- generated {part}:[^>]*-->\n).*?(<!-- end of {part} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{page} lacks the comments around {part!r}; see tools/reference.py")
    body = "\n" + "\n".join(lines()).strip() + "\n\n"
    return pattern.sub(lambda match: match[1] + body + match[2], text)


def _classes() -> dict[type, list[str]]:
    classes: dict[type, list[str]] = {Config: [""]}
    waiting: list[tuple[type, str]] = [(Config, "")]
    while waiting:
        cls, prefix = waiting.pop(0)
        for name, kind in typing.get_type_hints(cls).items():
            key = f"{prefix}.{name}".strip(".")
            for each in () if name in ELSEWHERE else dataclasses_in(kind):
                classes.setdefault(each, []).append(key)
                waiting.append((each, key))
    classes[Policy] = ["backend.policy"]
    return classes


def _row(key: Key, names: Sequence[str]) -> str:
    # *names* are the places of its dataclass, the key's own first; each is written in full, so that it is found
    written = ", ".join(f"`{each}{key.name.removeprefix(names[0])}`" for each in names)
    quoted = (
        key.default if key.default in ("required", "unlimited", "empty") or key.kind in KINDS else f"`{key.default}`"
    )
    kind = f"{key.kind}, {key.rule}" if key.rule else key.kind
    return f"| {' | '.join(cell.replace('|', '/') for cell in (written, kind, quoted, key.meaning))} |"


def _columns(of: Sequence[Column]) -> Iterator[str]:
    for column in of:
        unit = f" ({column.unit})" if column.unit else ""
        yield f"- `{column.name}`{unit}: {column.definition}"
    yield ""


def build(folder: Path) -> Path:
    """Write configuration.md into *folder* and return its path."""
    head = Path(__file__).with_name("configuration.md").read_text(encoding="utf-8")
    page = folder / "configuration.md"
    page.write_text(head + "\n" + "\n".join(configuration()).strip() + "\n", encoding="utf-8")
    return page


def main() -> None:
    """Write all pages, or only configuration.md into the folder that is named."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description="Write generated parts of docs.")
    parser.add_argument("folder", nargs="?", type=Path, help="write only configuration.md, into it")
    if folder := parser.parse_args().folder:
        build(folder)
        return
    build(ROOT / "docs")
    for part, (page, _) in PARTS.items():
        (ROOT / page).write_text(rewritten(part), encoding="utf-8")


if __name__ == "__main__":
    main()
