"""Sealed predictions stay as they were sealed, and tables of them as the files say."""

import gzip
import hashlib
import json
import re

import pytest

from pdsim.config.presets import ROOFLINE
from pdsim.core import files
from pdsim.core.files import data
from pdsim.results.evidence import FACTORS, SERVERS
from pdsim.validation.sealed import unseal
from pdsim.validation.verdicts import grouped
from tools import served, tables, transferred, validation

LIVE = ("live/**/expected-*.json", "live/**/second-*.json", "live/*.json")
PATTERNS = (*LIVE, "validation/*/expectations.json*")
SEALED = sorted(path for pattern in PATTERNS for path in data().glob(pattern))
PROBES = sorted(data("benchmarks").glob("probe-*.parquet"))


@pytest.mark.parametrize("path", SEALED, ids=lambda path: str(path.relative_to(data())))
def test_a_prediction_has_the_hash_of_its_content(path):
    content = files.whole(path)
    assert unseal(content, path.name)["sha256"] == json.loads(content)["sha256"]


@pytest.mark.parametrize("path", PROBES, ids=lambda path: path.stem)
def test_a_probe_names_the_hash_of_its_predictions(path):
    about = dict(line.split(": ", 1) for line in tables.comments(path))
    name, _, sha256 = about["predictions"].split()
    sealed = data("benchmarks", f"{name}.gz")
    assert hashlib.sha256(gzip.decompress(sealed.read_bytes())).hexdigest() == sha256


def test_sealed_transfers_give_the_factors_that_hold_them():
    every = transferred.points()
    assert transferred.factors(every) == FACTORS
    for own in grouped(every, lambda point: point.cause).values():
        inside = [each for here in transferred.held(own) for each in here]
        assert 90 <= round(100 * sum(inside) / len(inside)) <= 98


def test_sealed_loads_give_the_campaigns():
    assert validation.campaigns() == validation.CAMPAIGNS.read_text(encoding="utf-8")


def test_sealed_servers_give_the_factors_that_runs_print():
    every = served.points()
    for level, servers in SERVERS.items():
        own = [point for point in every if point.level == level]
        assert served.factors(own) == servers.factors
        assert len({point[1:4] for point in own}) == servers.loads
    table = "\n".join(served.table())
    assert all(90 <= int(share) <= 98 for share in re.findall(r"(\d+) \|$", table, re.MULTILINE))


def test_the_warning_of_a_roofline_has_measured_errors():
    errors = [
        int(text)
        for text in re.findall(
            r"\d+(?= and| %|,|;)", ROOFLINE.partition("; H100")[0].replace("MI300X", "").replace("MI355X", "")
        )
    ]
    rows = {(row["servers"], row["gpu"]): row for row in tables.rows(data("benchmarks", "scorecard.csv"))}
    for number, key in enumerate((("colocated", "mi300x"), ("colocated", "mi355x"), ("disaggregated", "mi355x"))):
        values = [round(float(rows[key][f"{name} %"])) for name in ("ttft", "tpot", "output")]
        assert errors[3 * number : 3 * number + 3] == values


def test_the_data_stay_small():
    assert sum(path.stat().st_size for path in data().rglob("*") if path.is_file()) <= 6_000_000
