"""Sealed predictions stay as they were sealed, and tables of them as the files say."""

import gzip
import hashlib
import json

import pytest

from pdsim.core import files
from pdsim.core.files import data
from pdsim.validation.intervals import BLIND
from pdsim.validation.sealed import unseal
from tools import tables, validation

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


def test_sealed_validations_give_intervals_and_campaigns():
    assert validation.blind(validation._stored()) == BLIND
    assert validation.campaigns() == validation.CAMPAIGNS.read_text(encoding="utf-8")


def test_the_data_stay_small():
    assert sum(path.stat().st_size for path in data().rglob("*") if path.is_file()) <= 6_000_000
