# SPDX-License-Identifier: Apache-2.0
"""The help page of each command, and the parser of the options that the page lists.

Most words of a command line are Hydra's overrides, which argparse does not know.  So `parse` reads the options from
the page: the documented options are those parsed and completed.  A new command has a line in `COMMANDS`, a page in
`PAGES`, and a function in `pdsim.cli.main`.  Nothing heavy is imported here: ``--help`` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pdsim
from pdsim.core.errors import ConfigError, near
from pdsim.core.plugins import groups, options

COMMANDS = {
    "run": "run an experiment on the model or on a real engine, and keep its results",
    "sweep": "run every combination of values, on all cores, Ray or Slurm; repeat the command to resume",
    "best": "rank the points of a sweep by goodput per GPU under an SLO",
    "explain": "show what limits a run, or why two runs differ",
    "report": "write an HTML page with the figures of a run, a sweep or a validation; or one as SVG, PDF, PNG",
    "timeline": "write a trace of one or more runs for ui.perfetto.dev",
    "show": "print the results of a kept run or sweep",
    "compare": "print the metrics of several runs side by side, and the keys that differ",
    "export": "write a run in the formats of AIPerf, nixlbench, or the metrics of vLLM and SGLang",
    "calibrate": "measure transfers of an engine, or read them from a file, and write a calibration",
    "refit": "fit shipped numbers again from their samples, and print the errors",
    "probe": "measure in ten minutes what works on this machine, and write one file to contribute",
    "profile": "measure the operators of a model on a GPU, and write a file for compute=",
    "validate": "predict transfers and requests, measure them on a real engine, and print the errors",
    "observe": "turn the logs of a deployment into a workload and a measured run",
    "diagnose": "say why measured transfers are slow: TCP, wire, host, polling",
    "recipe": "turn a command line or YAML of vLLM, SGLang, Dynamo or llm-d into a configuration, and back",
    "list": "list the choices of each group: pdsim list, pdsim list hw",
    "doctor": "list the engines and devices that work on this machine, and what the others need",
    "completion": "print the shell code that completes commands, groups and keys",
}

_OVERVIEW = """\
{about}

usage: pdsim COMMAND ...        (or: python -m pdsim COMMAND ...)

{commands}

  pdsim run                                           serve the default trace on a modelled 8 x H20 node
  pdsim run hw=2x8xh20 workload.trace=trace.jsonl     another machine, a trace of your own
  pdsim run target=real hw=loopback                   the same experiment on a real engine, on this machine
  pdsim COMMAND --help                                the arguments of a command

  --help  --version  help COMMAND  help KEY [KEY=VALUE ...]

Environment:
  NO_COLOR=1           no colours; pipes never get any
  COLUMNS=120          the width of tables on a terminal
  PDSIM_DEBUG=1        print tracebacks, as --debug

Exit status:
  0                    success
  1                    a run or a point of a sweep failed; its partial results are kept
  2                    the command cannot run; nothing was written
  130, 143             ended by Ctrl-C or SIGTERM; a run in progress is marked incomplete"""

PAGES = {}
PAGES["run"] = """\
usage: pdsim run [KEY=VALUE ...] [OPTION ...]

Choose one of each (pdsim list describes them):
{groups}

Set any key below them, sizes, rates and times with their units:
  hw.nic.rate=400Gbps  kv.pool=20GiB  backend.timeout=5s  parallel.prefill.tp=2  workload.rate=4
  target=model|real    on the SimPy model, or on the real engine (default: model)
  target=live          on real vLLM or SGLang servers: live.url=URL, or live.prefill=URL live.decode=URL
  memory=tracked       simulated memory keeps contents, so that transfers are checked (default: timing)
  seed=0               the same seed repeats a run bit for bit, on the model
  output=results       folder for the results

Options:
  --cfg job            print the complete configuration, with calibrations applied, and stop
  -m, --multirun       the same as pdsim sweep; with hydra/launcher=NAME or hydra/sweeper=NAME, Hydra's own
  --config-dir DIR     add your configuration files: DIR/hw/mybox.yaml is hw=mybox
  --config-path DIR    start from DIR/config.yaml, such as that of a kept run
  --config-name NAME   start from NAME.yaml of one of these, instead of pdsim's config.yaml
  hydra.KEY=VALUE      and --info, --hydra-help: a job of Hydra's, with results in its folder
  --json               print one JSON object instead of a dozen lines
  -v, --verbose        print every metric with its definition, and all evidence
  --quiet, -q          print nothing but errors
  --debug              print the traceback of an error (or set PDSIM_DEBUG=1)"""

PAGES["sweep"] = """\
usage: pdsim sweep [KEY=VALUE,VALUE ...] [OPTION ...]

  pdsim sweep hw=8xh20,8xh200 workload=poisson workload.rate=1,2,4        every combination
  pdsim sweep 'workload.rate=range(1,9)' workload=poisson                 Hydra's grammar: range, choice, glob, lists
  pdsim sweep parallel.prefill.tp=2,4 parallel.decode.tp=4,2 --zip parallel.prefill.tp,parallel.decode.tp

Results are in output/sweep-HASH, with a hash of the command: the same command later runs the missing points.
Each point has a folder there and a row of points.parquet; the row of a combination that cannot run has the reason.
Ctrl-C loses only the points in progress.

Options:
  --zip KEY,KEY        change these keys together instead of combining them; repeatable
  --seeds N            run every point with seeds 0 to N-1
  --search optuna      let Optuna choose the points; KEY=interval(LOW,HIGH) is a range
  --trials N           number of points (default: 50); a larger N continues the search
  --maximize METRIC    metric to maximize (default: goodput per GPU)
  --minimize METRIC    metric to minimize
  --track mlflow       log each point as a run of MLflow, where MLFLOW_TRACKING_URI says; or wandb
  executor=local       or ray, slurm; executor.workers=N and so on (pdsim list executor)
  --config-dir DIR     add your configuration files
  --config-path DIR    start from DIR/config.yaml
  --config-name NAME   start from NAME.yaml of one of these
  -v, --verbose        print every column with its definition
  --json               print one JSON object with the rows instead of a table
  --quiet, -q          print nothing but errors"""

PAGES["best"] = """\
usage: pdsim best FOLDER [--slo ttft=2s,tpot=30ms] [-v] [--json]

Rank the points of the sweep in FOLDER by goodput: requests per second and GPU that meet the SLO.  Without --slo
(ttft, tpot, e2e) each point's own SLO applies.  Prints ten rows, and the Pareto front of throughput and speed."""

PAGES["explain"] = """\
usage: pdsim explain FOLDER [FOLDER] [OPTION ...]

One run: print the share of time of each cause (compute, queue, admission, posting, link, host, polling), and
simulate the run again with each cause halved.
Two runs: name the cause of the difference, compare the phases, and simulate A with one group of B's configuration
at a time.

Options:
  --request N          explain one request instead of the mean
  --fast               read the files only; simulate nothing
  --json               print one JSON object"""

PAGES["completion"] = """\
usage: pdsim completion

Print the code that bash or zsh evaluates to complete pdsim; needs argcomplete (pip install 'pdsim[completion]'):
  eval "$(pdsim completion)"        # in ~/.bashrc or ~/.zshrc"""

PAGES["report"] = """\
usage: pdsim report FOLDER [-o FILE.html] [--slo ttft=2s,tpot=30ms]
       pdsim report FOLDER --figure NAME [--format svg|pdf|png] [-o FILE]
       pdsim report FOLDER [--serve] [--port N]

Write an HTML page about a run, a sweep or a validation, by default report.html in FOLDER.  It opens offline.
--figure writes one figure instead, named as in its link; --slo is the SLO for a sweep's points.
--serve shows the page in a browser of this machine, with the report of each point of a sweep, another SLO, and the
points that have ended of a sweep under way; --port is 127.0.0.1's (default: a free one).
Pages need plotly and figures matplotlib: pip install 'pdsim[report]'."""

PAGES["timeline"] = """\
usage: pdsim timeline FOLDER [FOLDER ...] [-o FILE.json[.gz]]

Write the trace events of complete runs, side by side, by default to timeline.json.gz in the first FOLDER: tracks of
queues, instances, ranks and engines, an arrow from prefill to decode for each request, and usage counters.
Open it at https://ui.perfetto.dev.  A run with samples=500 has counters of links, memories and staging rings too."""

PAGES["show"] = """\
usage: pdsim show FOLDER [FOLDER ...] [-v] [--json]

Print the output of a kept run or sweep again; -v prints every metric with its definition, --json one JSON object for
each run."""

PAGES["compare"] = """\
usage: pdsim compare FOLDER FOLDER [FOLDER ...] [--slo ttft=2s,tpot=30ms] [--json]

Print what was run and its command, the keys that differ between complete runs of one experiment, and each metric as
a number and as a multiple of the first run's.  --slo adds goodput and attainment under another SLO; --json prints
one JSON object instead."""

PAGES["export"] = """\
usage: pdsim export FOLDER --format NAME [--to DIR]

Write the run in FOLDER as another tool does, and print the files:
  aiperf       profile_export.jsonl, profile_export_aiperf.json and .csv, as AIPerf
  nixlbench    its table, of the pairs of experiment=transfer: a file an operation and number of threads
  vllm         histograms named as those of vLLM, such as vllm:time_to_first_token_seconds, in Prometheus' format
  sglang       the same of SGLang

Options:
  --format NAME     aiperf, nixlbench, vllm or sglang
  --to DIR          folder for the files (default: FOLDER)"""

PAGES["validate"] = """\
usage: pdsim validate [KEY=VALUE ...] [OPTION ...]

  pdsim validate target=real hw=loopback backend=nixl_shm           predict, keep the predictions, measure, compare
  pdsim validate experiment.stored=FOLDER hw=2xh200 backend=nixl    compare an earlier measurement again
  pdsim validate target=live live.prefill=URL live.decode=URL       validate servers, at shares of workload.rate
  pdsim validate --against inferencex FILE.csv                      predict whole servers, DeepSeek-R1 of InferenceX

The same as pdsim run experiment=validate (target=live: validate_live), with its keys (--cfg job shows them):
  experiment.classes=[pair,serve]    classes to compare: pair, read, contention, handoff, allgather, serve
  experiment.predict=now             predict a stored measurement again, with the present model
  experiment.quick=true              at most 3 minutes: one job, few pairs, reads and handoffs
  experiment.repeat, experiment.jobs, experiment.limit     the amount of measurement
  experiment.bounds.pair=0.05        bound of the median error; beyond it the run fails with exit status 1"""

PAGES["observe"] = """\
usage: pdsim observe FILE [KEY=VALUE ...] [OPTION ...]

  pdsim observe result.json hw=2xh200 model=qwen3-8b engine=vllm    from vllm bench serve --save-detailed
  pdsim observe profile_export.jsonl hw=8xh200                      from aiperf
  pdsim observe decode.log                                          transfers, from logs of vLLM, NIXL, Mooncake

Writes FILE.trace.jsonl for workload.trace, and a run for pdsim compare; KEY=VALUE describe the deployment.  The same
KEY=VALUE with pdsim run workload.trace=FILE.trace.jsonl predict it.  A log of transfers becomes FILE.samples.csv,
for pdsim calibrate --from.

Options:
  --format NAME     vllm-bench, aiperf, sglang, vllm, nixl or mooncake (default: by its content)
  --to DIR          folder for the trace (default: here)"""

PAGES["diagnose"] = """\
usage: pdsim diagnose FILE|FOLDER|URL [KEY=VALUE ...] [OPTION ...]

  pdsim diagnose decode.log hw=2x8xh200 backend=nixl_vllm              vLLM's "KV Transfer metrics" lines
  pdsim diagnose http://decode:8100/metrics hw=2xh200 backend=nixl_vllm
  pdsim diagnose nixlbench.txt hw=2x8xh100 backend=nixl                or any format that calibrate --from reads
  pdsim diagnose results/transfer-...                                  a run of experiment=transfer

Prints each kind of transfer beside what the engine's model expects, and ranks the causes that explain the
difference: over TCP, a slow wire, slow host, late completions, more descriptors.  KEY=VALUE are those of the
deployment.

Options:
  --format NAME     of the file (default: by its content): {formats}
  --path NAME       intra or inter: within a node, or across (default: intra on one node)
  --config-dir DIR  add your configuration files, such as DIR/calibration of this machine when it was well
  --json            print one JSON object"""

PAGES["recipe"] = """\
usage: pdsim recipe TEXT|FILE ... [KEY=VALUE ...] [OPTION ...]

  pdsim recipe "vllm serve Qwen/Qwen3-8B" hw=1xh100                a server of its own
  pdsim recipe prefill.sh decode.sh hw=8xh200 --run                prefill and decode servers, and run them
  pdsim recipe deploy.yaml hw=2x8xh200 -o deployment.yaml          Kubernetes, LWS, Dynamo, llm-d, InferenceX
  pdsim recipe --to vllm results/serve-...                         the launch commands of a kept run

Prints what each flag decides, which flags have no effect on times, and which are not modelled.  TEXT is a command
line in quotes; a file may be a script.  KEY=VALUE add to the configuration: hw, workload.

Options:
  --run                run it
  --ignore-unknown     go on with flags that no known release has
  --to ENGINE          vllm or sglang: print the launch commands of the run in FOLDER
  -o FILE              write the configuration as a YAML file"""

PAGES["calibrate"] = """\
usage: pdsim calibrate [KEY=VALUE ...] [OPTION ...]

  pdsim calibrate target=real hw=loopback backend=nixl_shm      measure a grid on the real engine, fit, write
  pdsim calibrate --from out.txt hw=2x8xh100 backend=nixl       fit the output of nixlbench
  pdsim calibrate --from probe-8xmi300x.zip --to mine           fit a bundle of pdsim probe, for --config-dir mine

KEY=VALUE as in pdsim run: hw, backend, target, experiment.operation=read, output, seed.

Options:
  --from FILE       fit these samples instead of measuring: a calibration's CSV, a published table, a tool's output
  --format NAME     of that file (default: by its content): {formats}
  --path NAME       intra or inter: the engine's model to fit (default: intra on one node)
  --name NAME       of the calibration (default: BACKEND-HW, which runs use by default)
  --to DIR          folder for NAME.yaml and NAME.csv (default: here; conf/calibration makes it a choice); for the
                    groups of a bundle (default: its name)
  --largest SIZE    largest transfer to measure (default: 256MiB)
  --held N          random points to hold out of the fit (default: 16)
  --repeat N        least transfers of a point; short ones run up to 50 times (default: 5)
  --jobs N          jobs of fresh ranks; the geometric mean of their medians counts (default: 9)
  --quick           at most 3 minutes: --jobs 3 --largest 4MiB --held 8 --repeat 3, fewer jobs if they are slow
  --no-fit          keep the samples and fit nothing, without SciPy
  --config-dir DIR  add your configuration files, such as DIR/hw of this machine"""

PAGES["probe"] = """\
usage: pdsim probe [KEY=VALUE ...] [OPTION ...]

  pdsim probe                                      host memory of this machine, where it has no GPU
  pdsim probe hw=8xmi300x                          a machine with GPUs; pdsim list hw, or --config-dir DIR
  pdsim probe hw=2x8xmi300x hw.gpus=4              between two halves of it, through its network cards

Measures transfers over each engine that works here (calibrate --quick), forwards (profile) and all-gathers, and
writes probe-HW.zip, without names, addresses or paths of the machine.  It prints the plan first.  What fails or
takes too long is named, and the rest goes on; Ctrl-C keeps what there is.  calibrate --from probe-HW.zip fits it.

Options:
  --minutes N       for all of it (default: 10)
  --to DIR          folder for the bundle (default: here)
  --config-dir DIR  add your configuration files, such as DIR/hw of this machine"""

PAGES["refit"] = """\
usage: pdsim refit [published [NAME ...] | bare | options | collectives | handoffs]

Fit again from the samples in data/, in a checkout of the repository, and print the held-out errors:
  published      every calibration from published numbers, or those of these names (default)
  bare           calibrations of bare libraries, from pairs posted to them directly
  options        NIXL's progress thread: by_option of conf/backend/nixl.yaml
  collectives    conf/collective: all-gathers over NCCL and symmetric memory
  handoffs       hosts and copies in a handoff: copies, wake and idle_wake of conf/hw/8xh200.yaml"""

PAGES["profile"] = """\
usage: pdsim profile [KEY=VALUE ...] [OPTION ...]

  pdsim profile hw=8xh100                                 measure on the GPUs here, fit, write h100.csv and h100.yaml
  pdsim profile --from data/compute/h100.csv hw=8xh100    fit earlier measurements
  pdsim profile --from h100_sxm --tables vllm:0.24.0 --compact h200_torch hw=8xh100 --name h100_vllm

Measures matrix products, attention, experts, latent attention, norms, all-reduces, and whole steps with and without
CUDA graphs, in PyTorch.  Every second size and the whole steps are held out of the fit.  hw= gives the peak rates.

Options:
  --models LIST     MODEL, MODEL:TP or MODEL:TP:LAYERS with commas; LAYERS of a whole step (default: eight of them)
  --device cpu      on the processor, in small sizes, as a trial
  --gpus N          GPUs to use (default: all)
  --limit TIME      for all measurements, most valuable first (default: 110s)
  --from FILE       fit these rows instead of measuring; or a folder of operator tables, or such as h100_sxm those of
                    aiconfigurator-core (pdsim[operators])
  --tables E:V      engine and version of those tables (default: sglang:0.5.10)
  --compact NAME    keep the tables, thinned; norms and launches, which they lack, are those of compute=NAME
  --name NAME       name of the two files (default: the GPU's)
  --to DIR          folder for them (default: here; conf/compute makes the YAML a choice)
  --config-dir DIR  add your configuration files"""

PAGES["list"] = """\
usage: pdsim list [GROUP ...] [--schema] [--json] [--config-dir DIR]
       pdsim list compute [KEY=VALUE ...]    also the file that auto takes for these values, why, and its errors

List the choices with a line about each: of all groups, or of some of
{groups}.

  --schema          print the keys of a file of GROUP: type, range, default and meaning, and a file to begin with
  --json            print one JSON object: by group, each choice with its line"""

PAGES["doctor"] = """\
usage: pdsim doctor [--host [--json]] [--config-dir DIR]

Try every engine and device on this machine; print why one does not work, and the remedy.

  --host            measure in seconds how fast this host schedules, posts, wakes, reads clocks and copies, beside
                    the hosts of pdsim's numbers, and print the engine.host_factor= and host_factor= of a run
  --json            print that as one JSON object"""


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
    if command in ("calibrate", "diagnose"):
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
    """Return the options of *command* by long name, with the placeholder of their value; "" if they take none.

    >>> flags("best")
    {'--slo': 'ttft=2s,tpot=30ms', '--verbose': '', '--json': ''}
    """
    usage, _, rest = PAGES[command].partition("\n\n")
    listed = re.findall(r"(?<![\w-])(--?[a-z][\w-]*)(?: ([^\s\]]+))?", usage)
    listed += re.findall(r"^  (--?[a-z][\w-]*)(?:, -\w+|, --\w+)?(?: (\S+))?(?: {2,}|$)", rest, re.MULTILINE)
    return {_LONG.get(name, name): value for name, value in listed if name not in ("--info", "--help")}


def parse(command: str, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split *words* into overrides or folders, in their order, and the values of options by their long names.

    Raise a `ConfigError` for an unknown option, with the nearest known one, for an option without its value, and for
    a value of another type.

    >>> parse("calibrate", ["hw=loopback", "--jobs", "2"])
    (['hw=loopback'], {'--jobs': 2})
    """
    known, rest, values = flags(command), list[str](), dict[str, Any]()
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            rest.append(word)
            continue
        short, equals, text = word.partition("=")
        name = _LONG.get(short, short)
        if name not in known:
            hint = near(name, known) or "keys are written KEY=VALUE, without dashes; "
            if short[2:] in groups():  # a choice, not an option
                hint = f"write {short[2:]}={text or next(left, 'NAME')}, or "
            raise ConfigError(f"unknown option {short}; {hint}see pdsim {command} --help")
        if not known[name]:
            values[name] = True
            continue
        if not equals and (text := next(left, "")) == "":
            raise ConfigError(f"{name} needs a value after it; see pdsim {command} --help")
        try:
            value = _converted(known[name].partition(".")[0], text)
        except ValueError as error:
            raise ConfigError(f"{name} {text}: {error}") from error
        values[name] = (*values.get(name, ()), value) if name == "--zip" else value
    return rest, values


def plain_name(option: str, text: str) -> str:
    """Return *text*, the name of a file that *option* gives; raise a `ConfigError` if it is a path or has blanks."""
    if text and not re.fullmatch(r"[\w.-]+", text):
        raise ConfigError(
            f"{option} {text}: must be letters, digits, dots, hyphens and underscores; the folder is --to"
        )
    return text


def _converted(kind: str, text: str) -> Any:
    if kind in ("SIZE", "TIME"):
        from pdsim.core import units  # 8 ms, which --help does without

        return (units.parse_size if kind == "SIZE" else units.parse_time)(text)
    if kind == "N" and not text.isdecimal():
        raise ValueError("must be a whole number >= 0")
    return int(text) if kind == "N" else Path(text) if kind in ("FILE", "DIR") else text
