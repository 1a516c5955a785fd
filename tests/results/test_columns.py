"""Columns are what pyarrow makes of the same values, and pandas is not imported for them."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from pdsim.results.schema import arrow_array

VALUES = [
    ("float64", [1.5, None, 2, float("inf")]),
    ("float64", []),
    ("float64", np.array([0.1, np.nan])),
    ("float64", np.arange(6.0)[::2]),
    ("float64", np.array([1, 2])),
    ("int64", [1.5, 2.0]),
    ("int64", [1, None, -(2**62)]),
    ("int64", np.array([3, 4], dtype=np.int64)),
    ("int64", np.array([3, 4], dtype=np.int32)),
    ("string", ["a", None, "", "ü€"]),
    ("string", np.array(["ok", "failed"])),
    ("string", np.array(["ok", "failed"], dtype=object)),
    ("string", [None, None]),
    ("bool", [True, None, False]),
]


@pytest.mark.parametrize(("kind", "values"), VALUES)
def test_an_array_is_what_pyarrow_makes_of_the_values(kind, values):
    found, expected = arrow_array(values, pa.type_for_alias(kind)), pa.array(values, type=pa.type_for_alias(kind))
    found.validate(full=True)
    assert found.type == expected.type
    assert str(found) == str(expected)
    assert found.null_count == expected.null_count


@pytest.mark.parametrize(("kind", "values"), [("float64", ["x"]), ("string", [1]), ("int64", [2**80])])
def test_what_a_type_does_not_hold_is_refused_as_pyarrow_does(kind, values):
    with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError, OverflowError)) as ours:
        arrow_array(values, pa.type_for_alias(kind))
    with pytest.raises(type(ours.value)) as theirs:
        pa.array(values, type=pa.type_for_alias(kind))
    assert str(ours.value) == str(theirs.value)


def test_what_is_masked_is_null():
    found = arrow_array(np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]), pa.float64())
    assert found.to_pylist() == [1.0, None, 3.0]
    assert arrow_array(np.ma.array([1.0, 2.0], mask=[False, False]), pa.float64()).to_pylist() == [1.0, 2.0]


def test_a_run_imports_no_pandas(tmp_path):
    pytest.importorskip("pandas", reason="which nothing could import")
    code = (
        "import sys; from pdsim.cli.main import main; "
        "status = main(['run', 'workload=smoke', '-q']); sys.exit(status or 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
