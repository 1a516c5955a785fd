# SPDX-License-Identifier: Apache-2.0
"""The command line of the probe."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import benchmarks.probe as probe
from benchmarks.probe import cores
from benchmarks.probe.measuring import measure

PREDICTED = Path("data/benchmarks/probe-placed-2xh200-predicted.csv")


def main() -> int:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=probe.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict", help="write what the model says")
    predicting.add_argument("--to", type=Path, required=True)
    predicting.add_argument(
        "hw", nargs="?", default="hw=2xh200", help="a configuration's machine, such as hw=2xh200"
    )
    measuring = commands.add_parser("measure", help="measure")
    measuring.add_argument("--to", type=Path, required=True)
    measuring.add_argument("--host", action="store_true", help="over loopback TCP, a dry run")
    measuring.add_argument(
        "--bound", action="store_true", help="NIXL's progress thread on chosen processors instead"
    )
    measuring.add_argument("--seconds", type=float, default=270.0, help="no point begins later; default: 270")
    measuring.add_argument("--predictions", type=Path, default=PREDICTED, help="whose hash the result notes")
    mapping = commands.add_parser("cores", help="find which processors share a core")
    mapping.add_argument("--to", type=Path, required=True)
    mapping.add_argument("--host", action="store_true", help="without GPUs")
    judging = commands.add_parser("judge", help="compare")
    judging.add_argument("predicted", type=Path)
    judging.add_argument("measured", type=Path)
    sampling = commands.add_parser("samples", help="make samples of a calibration of measured pairs")
    sampling.add_argument("--to", type=Path, required=True)
    sampling.add_argument("variants", nargs="+", help="such as nixl/off, then files: a set of processes each")
    options = parser.parse_args()
    if options.command == "measure":
        known = options.predictions
        told = f"{known.name} sha256 {hashlib.sha256(known.read_bytes()).hexdigest()}" if known.is_file() else ""
        return min(
            1, measure(options.to, host=options.host, seconds=options.seconds, predictions=told, bound=options.bound)
        )
    if options.command == "cores":
        cores.measure(options.to, gpus=not options.host)
        return 0
    from benchmarks.probe import pairs, predictions

    if options.command == "samples":
        files = [Path(word) for word in options.variants if word.endswith(".csv")]
        pairs.to_samples([word for word in options.variants if not word.endswith(".csv")], files, options.to)
    elif options.command == "predict":
        predictions.write(options.to, options.hw)
    else:
        predictions.judge(options.predicted, options.measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
