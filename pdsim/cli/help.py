# SPDX-License-Identifier: Apache-2.0
"""The help pages, and what they say of options: a command reads its words by its own page.

Nearly all that is typed are Hydra's overrides, whose grammar, groups and keys argparse would not know.  So a page is
written out, read from the top (usage, what most people want, options), and `parse` takes the options from it: what
is documented is what is parsed and completed.  A new command has a line in `COMMANDS`, a page in `PAGES`, and a
function in `pdsim.cli.main`.  Nothing heavy is imported here: ``--help`` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pdsim
from pdsim.core.errors import ConfigError, near
from pdsim.core.plugins import groups, options
from pdsim.core.units import parse_size, parse_time

__all__ = ["COMMANDS", "flags", "of", "overview", "parse", "plain_name"]

COMMANDS = {
    "run": "run an experiment, on the model or on a real engine, and keep and print its results",
    "sweep": "run every combination of values, on all cores, Ray or Slurm; the same command goes on where it ended",
    "best": "rank the points of a sweep under an SLO, by goodput for each GPU",
    "explain": "what bounded a run and what a twofold relief would bring, or which cause makes two runs differ",
    "report": "write one HTML page with the figures of a run, a sweep or a validation; or a figure as SVG, PDF, PNG",
    "timeline": "write what happened when in one run, or several side by side, for ui.perfetto.dev",
    "show": "print the results that a run or a sweep left behind",
    "compare": "set the numbers of two or more runs side by side, and what differs in their configurations",
    "calibrate": "fit an engine's parameters to transfers that it measures, or that a file has, and write them down",
    "refit": "fit shipped numbers again, from the samples that they name, and say how far they are from others",
    "profile": "measure what a model's forward is made of on a GPU, fit, and write it down for compute=",
    "validate": "predict held-out points, then measure them on a real engine, and say how far off they are",
    "observe": "make a workload and a measured run of what a deployment has logged",
    "list": "what there is to choose from: pdsim list, pdsim list hw",
    "doctor": "which engines and devices work on this machine, and what the others need",
    "completion": "what the shell evaluates to complete commands, groups and keys",
}

_OVERVIEW = """\
{about}

usage: pdsim COMMAND ...        (or: python -m pdsim COMMAND ...)

{commands}

  pdsim run                                           serve the default trace on a modelled 8 x H20 node
  pdsim run hw=2x8xh20 workload.trace=trace.jsonl     another machine, a trace of your own
  pdsim run target=real hw=loopback                   the same experiment on a real engine, on this machine
  pdsim COMMAND --help                                everything that a command takes

  --help  --version  help COMMAND

Environment:
  NO_COLOR=1           no colours; there are none in pipes either
  COLUMNS=120          the width of tables on a terminal
  PDSIM_DEBUG=1        the traceback of an error, as --debug

Exit status:
  0                    all went well
  1                    a run failed, or a point of a sweep; what there is of it is kept
  2                    what was typed cannot be run, and nothing was written
  130, 143             ended by Ctrl-C, by SIGTERM; a run that had begun is marked incomplete"""

PAGES = {}
PAGES["run"] = """\
usage: pdsim run [KEY=VALUE ...] [OPTION ...]

Choose one of each (pdsim list says what each is):
{groups}

Set any key below them, sizes, rates and times with their units:
  hw.nic.rate=400Gbps  kv.pool=20GiB  backend.timeout=5s  parallel.prefill.tp=2  workload.rate=4
  target=model|real    on the SimPy model, or on the real engine (default: model)
  target=live          on real vLLM or SGLang servers: live.url=URL, or live.prefill=URL live.decode=URL
  memory=tracked       simulated memory keeps contents, so that transfers are checked (default: timing)
  seed=0               one seed gives one run, bit for bit, on the model
  output=results       folder for the results

Options:
  --cfg job            print what the run will use, every key that there is, calibrations applied, and stop
  -m, --multirun       the same as pdsim sweep; with hydra/launcher=NAME or hydra/sweeper=NAME, Hydra's own
  --config-dir DIR     look for more configuration files there: DIR/hw/mybox.yaml is hw=mybox
  --config-path DIR    start from DIR/config.yaml, such as that of a kept run
  --config-name NAME   start from NAME.yaml of one of these, instead of pdsim's config.yaml
  hydra.KEY=VALUE      and --info, --hydra-help: a job of Hydra's, with results in its folder
  --json               print one JSON object instead of a dozen lines
  -v, --verbose        print every number with its definition, and everything that it rests on
  --quiet, -q          print nothing but errors
  --debug              print the traceback of an error (or set PDSIM_DEBUG=1)"""

PAGES["sweep"] = """\
usage: pdsim sweep [KEY=VALUE,VALUE ...] [OPTION ...]

  pdsim sweep hw=8xh20,8xh200 workload=poisson workload.rate=1,2,4        every combination
  pdsim sweep 'workload.rate=range(1,9)' workload=poisson                 Hydra's grammar: range, choice, glob, lists
  pdsim sweep parallel.prefill.tp=2,4 parallel.decode.tp=4,2 --zip parallel.prefill.tp,parallel.decode.tp

The results are in output/sweep-HASH, where HASH is of the command: given again, the command runs what is missing.
Every point has a folder there, named by a hash of its configuration, and a row of points.parquet; a combination that
cannot be run is a row with the reason.  Ctrl-C loses the points under way only.

Options:
  --zip KEY,KEY        these keys change together instead of being combined; may be given more than once
  --seeds N            every point with the seeds 0 to N-1
  --search optuna      points that Optuna chooses, instead of every combination; KEY=interval(LOW,HIGH) is a range
  --trials N           how many of them (default: 50); more goes on with the same search
  --maximize METRIC    what is searched for (default: goodput per GPU, the highest)
  --minimize METRIC    the same, the lowest
  executor=local       or ray, slurm; executor.workers=N and so on (pdsim list executor)
  --config-dir DIR     look for more configuration files there
  --config-path DIR    start from DIR/config.yaml
  --config-name NAME   start from NAME.yaml of one of these
  -v, --verbose        print every column with its definition
  --json               print one JSON object with the rows instead of a table
  --quiet, -q          print nothing but errors"""

PAGES["best"] = """\
usage: pdsim best FOLDER [--slo ttft=2s,tpot=30ms] [-v] [--json]

Rank the points of the sweep in FOLDER by goodput: requests a second and GPU that meet the SLO, by default that of
each point's configuration.  Ten rows, and the Pareto front of throughput over speed.
--slo takes ttft, tpot and e2e."""

PAGES["explain"] = """\
usage: pdsim explain FOLDER [FOLDER] [OPTION ...]

Of one run: the share of the time that each cause takes (compute, queue, admission, posting, link, host, polling),
and what it would bring to relieve it twofold, by simulating the run again with its numbers halved or doubled.
Of two: in a sentence with numbers which cause makes the difference, each phase, and A with one group of B's
configuration at a time, simulated.

Options:
  --request N          of one request instead of the mean
  --fast               from the files alone, nothing simulated
  --json               print one JSON object"""

PAGES["completion"] = """\
usage: pdsim completion

Print what bash or zsh evaluates to complete pdsim; needs argcomplete (pip install 'pdsim[completion]'):
  eval "$(pdsim completion)"        # in ~/.bashrc or ~/.zshrc"""

PAGES["report"] = """\
usage: pdsim report FOLDER [-o FILE.html] [--slo ttft=2s,tpot=30ms]
       pdsim report FOLDER --figure NAME [--format svg|pdf|png] [-o FILE]

Write one HTML page about a run, a sweep or a validation, by default report.html in FOLDER.  It opens without a
network.  --figure writes one of its figures instead, by the name in its link; --slo is that of a sweep's points.
Pages need plotly and figures matplotlib: pip install 'pdsim[report]'."""

PAGES["timeline"] = """\
usage: pdsim timeline FOLDER [FOLDER ...] [-o FILE.json[.gz]]

Write the trace events of complete runs, several side by side, by default timeline.json.gz in the first FOLDER:
tracks of queues, instances, ranks and engines, an arrow from prefill to decode of each request, and counters of
what is in use.
Open it at https://ui.perfetto.dev.  A run with samples=500 has counters of links, memories and staging rings too."""

PAGES["show"] = """\
usage: pdsim show FOLDER [FOLDER ...] [-v] [--json]

Print again what a run, or a sweep, printed at its end; -v prints every number with its definition.
--json prints one JSON object a run instead."""

PAGES["compare"] = """\
usage: pdsim compare FOLDER FOLDER [FOLDER ...] [--json]

Print what differs in the configurations of complete runs, and each metric of all of them, as a number and as a
multiple of the first run's.  All of them are of one experiment.  --json prints one JSON object instead."""

PAGES["validate"] = """\
usage: pdsim validate [KEY=VALUE ...] [OPTION ...]

  pdsim validate target=real hw=loopback backend=nixl_shm           predict, keep the predictions, measure, compare
  pdsim validate experiment.stored=FOLDER hw=2xh200 backend=nixl    compare again what an earlier run measured
  pdsim validate target=live live.prefill=URL live.decode=URL       the same of servers, at shares of workload.rate

It is pdsim run experiment=validate (target=live: validate_live), and takes what that takes (--cfg job shows it):
  experiment.classes=[pair,serve]    what is compared; of pair, read, contention, handoff, allgather, serve
  experiment.predict=now             of what is stored: with the model of today
  experiment.repeat, jobs, limit     how much is measured
  experiment.bounds.pair=0.05        the median error that is asked for, or the run fails: exit status 1"""

PAGES["observe"] = """\
usage: pdsim observe FILE [KEY=VALUE ...] [OPTION ...]

  pdsim observe result.json hw=2xh200 model=qwen3-8b engine=vllm    of vllm bench serve --save-detailed
  pdsim observe profile_export.jsonl hw=8xh200                      of aiperf
  pdsim observe decode.log                                          of transfers, as vLLM, NIXL, Mooncake count them

Writes FILE.trace.jsonl for workload.trace, and a run for pdsim compare, whose KEY=VALUE describe the deployment; the
same KEY=VALUE with pdsim run workload.trace=FILE.trace.jsonl predict it. Of transfers it writes FILE.samples.csv for
pdsim calibrate --from.

Options:
  --format NAME     vllm-bench, aiperf, sglang, vllm, nixl or mooncake, if FILE does not show it
  --to DIR          where the trace is written (default: here)"""

PAGES["calibrate"] = """\
usage: pdsim calibrate [KEY=VALUE ...] [OPTION ...]

  pdsim calibrate target=real hw=loopback backend=nixl_shm      measure a grid on the real engine, fit, write
  pdsim calibrate --from out.txt hw=2x8xh100 backend=nixl       fit what nixlbench printed

KEY=VALUE as in pdsim run: hw, backend, target, experiment.operation=read, output, seed.

Options:
  --from FILE       fit these samples instead of measuring: a calibration's CSV, a published table, a tool's output
  --format NAME     of that file, if it does not show: {formats}
  --path NAME       intra or inter: which of the engine's models the samples are about (default: intra on one node)
  --name NAME       of the calibration (default: BACKEND-HW, the name that is chosen by itself)
  --to DIR          where NAME.yaml and NAME.csv are written (default: here; conf/calibration makes them a choice)
  --largest SIZE    bytes of the largest transfer that is measured (default: 256MiB)
  --held N          points that are drawn at random and held out (default: 16)
  --repeat N        transfers of a point, at least; short ones are made up to 50 times (default: 5)
  --jobs N          how often the ranks are started anew; the geometric mean of their medians counts (default: 9)"""

PAGES["refit"] = """\
usage: pdsim refit [published [NAME ...] | bare | options | collectives | handoffs]

Fit again, from the samples in data/ (in a checkout of the repository), and print the errors on what was left out:
  published      every calibration from published numbers, or those of these names (default)
  bare           calibrations of bare libraries, from pairs posted to them directly
  options        what NIXL's progress thread adds: by_option of conf/backend/nixl.yaml
  collectives    conf/collective: all-gathers over NCCL and symmetric memory
  handoffs       what hosts and copies cost in a handoff: copies, wake and idle_wake of conf/hw/8xh200.yaml"""

PAGES["profile"] = """\
usage: pdsim profile [KEY=VALUE ...] [OPTION ...]

  pdsim profile hw=8xh100                                 measure on the GPUs here, fit, write h100.csv and h100.yaml
  pdsim profile --from data/compute/h100.csv hw=8xh100    fit what was measured before
  pdsim profile --from DIR/h100_sxm --tables vllm:0.24.0 --compact h200_torch hw=8xh100 --name h100_vllm

Matrix products, attention, experts, latent attention, norms, all-reduces, and whole steps in CUDA graphs and
without, as PyTorch runs them.  Every second size and the whole steps are held out of the fit.  hw= names the peaks.

Options:
  --models LIST     MODEL, MODEL:TP or MODEL:TP:LAYERS with commas; LAYERS of a whole step (default: eight of them)
  --device cpu      on the processor, in small sizes: to try it
  --gpus N          of this machine (default: all)
  --limit TIME      for all measurements, most valuable first (default: 110s)
  --from FILE       fit these rows instead of measuring; or a GPU's folder of aiconfigurator's operator tables
  --tables E:V      engine and version of those tables (default: sglang:0.5.10)
  --compact NAME    keep the tables themselves, thinned; norms and launches, which they lack, are as in compute=NAME
  --name NAME       of the two files (default: the GPU's)
  --to DIR          where they are written (default: here; conf/compute makes the YAML a choice)"""

PAGES["list"] = """\
usage: pdsim list [GROUP ...] [--config-dir DIR]

What there is to choose from, with a line about each: all groups, or some of
{groups}."""

PAGES["doctor"] = """\
usage: pdsim doctor [--host] [--config-dir DIR]

Try every engine and device on this machine, and say of those that do not work why, and what would help.

  --host            in a second, what this host takes for its part of a transfer: host_factor= of a run"""


def overview() -> str:
    """Return the help of the program."""
    return _OVERVIEW.format(
        about=pdsim.__doc__, commands="\n".join(f"  {name:<11}{COMMANDS[name]}" for name in COMMANDS)
    )


def of(command: str) -> str:
    """Return the help of *command*, one of `COMMANDS`, with the groups and formats that packages add."""
    page = PAGES[command]
    if command == "run":
        return page.format(
            groups="\n".join(f"  {group + '=':<13}{' | '.join(options(group))}" for group in groups())
        )
    if command == "calibrate":
        from pdsim.calibration.importers import FORMATS

        return page.format(formats=", ".join(FORMATS))
    return page.format(groups=", ".join(groups())) if command == "list" else page


# --- options -------------------------------------------------------------------------------------------------------

_LONG = {
    "-v": "--verbose", "-q": "--quiet", "-o": "--output", "-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir",
    "-cn": "--config-name", "-cp": "--config-path",
}  # fmt: skip


@cache
def flags(command: str) -> Mapping[str, str]:
    """Return the options of *command* by their long names, with what stands for the value; "" if they take none.

    >>> flags("best")
    {'--slo': 'ttft=2s,tpot=30ms', '--verbose': '', '--json': ''}
    """
    usage, _, rest = PAGES[command].partition("\n\n")
    found = re.findall(r"(?<![\w-])(--?[a-z][\w-]*)(?: ([^\s\]]+))?", usage)
    found += re.findall(r"^  (--?[a-z][\w-]*)(?:, -\w+|, --\w+)?(?: (\S+))?(?: {2,}|$)", rest, re.MULTILINE)
    return {_LONG.get(name, name): value for name, value in found if name not in ("--info", "--help")}


def parse(command: str, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split *words* into overrides or folders, in their order, and the values of options by their long names.

    An option is written ``--name VALUE`` or ``--name=VALUE``; the last of a name counts, and of ``--zip`` all do.  A
    value is of the type that its page names: N is a whole number, SIZE bytes, TIME seconds, FILE and DIR paths.

    Raise a `ConfigError` for an unknown option, with the nearest known one, for an option without its value, and for
    a value of another type.

    >>> parse("calibrate", ["hw=loopback", "--jobs", "2"])
    (['hw=loopback'], {'--jobs': 2})
    """
    known, rest, found = flags(command), list[str](), dict[str, Any]()
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            rest.append(word)
            continue
        short, equals, text = word.partition("=")
        name = _LONG.get(short, short)
        if name not in known:
            raise ConfigError(f"unknown option {short}; {near(name, known)}see pdsim {command} --help")
        if not known[name]:
            found[name] = True
            continue
        if not equals and (text := next(left, "")) == "":
            raise ConfigError(f"{name} needs a value after it; see pdsim {command} --help")
        try:
            value = _TYPES.get(known[name].partition(".")[0], str)(text)
        except ValueError as error:
            raise ConfigError(f"{name} {text}: {error}") from error
        found[name] = (*found.get(name, ()), value) if name == "--zip" else value
    return rest, found


def plain_name(option: str, text: str) -> str:
    """Return *text*, the name of a file that *option* gives; raise a `ConfigError` if it is a path or has blanks."""
    if text and not re.fullmatch(r"[\w.-]+", text):
        raise ConfigError(
            f"{option} {text}: must be letters, digits, dots, hyphens and underscores; the folder is --to"
        )
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("must be a whole number >= 0")
    return int(text)


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "N": _count, "SIZE": parse_size, "TIME": parse_time, "FILE": Path, "DIR": Path,
}  # fmt: skip
