"""Arrow arrays are made without pandas: None and a missing number are null, what a type does not hold is refused."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from pdsim.results import schema
from pdsim.results.schema import arrow_array
from pdsim.transfer.log import ArrayColumn

WORDS = ArrayColumn(np.array([1, 0, 1]), ["ok", None])


@pytest.mark.parametrize("small", [0, 10])
@pytest.mark.parametrize(
    ("kind", "values", "rows"),
    [
        ("float64", [1.5, None, 2, float("inf")], [1.5, None, 2.0, float("inf")]),
        ("float64", ArrayColumn(np.array([0.1, np.nan])), [0.1, None]),
        ("float64", np.arange(6.0)[::2], [0.0, 2.0, 4.0]),
        ("int64", [1, None, -(2**62)], [1, None, -(2**62)]),
        ("int64", ArrayColumn(np.array([3.0, np.nan])), [3, None]),
        ("int64", np.array([3, 4], dtype=np.int32), [3, 4]),
        ("string", ["a", None, "", "ü€"], ["a", None, "", "ü€"]),
        ("string", WORDS, [None, "ok", None]),
        ("string", [], []),
    ],
)
def test_an_array_has_the_values_and_nulls(monkeypatch, kind, values, rows, small):
    monkeypatch.setattr(schema, "_SMALL", small)
    array = arrow_array(values, pa.type_for_alias(kind))
    array.validate(full=True)
    assert (str(array.type).replace("double", "float64"), array.to_pylist()) == (kind, rows)


@pytest.mark.parametrize(("kind", "values"), [("float64", ["x"]), ("string", [1]), ("int64", [2**80])])
def test_what_a_type_does_not_hold_is_refused(kind, values):
    with pytest.raises((ValueError, OverflowError)):
        arrow_array(values, pa.type_for_alias(kind))


def test_a_run_imports_no_pandas(tmp_path):
    pytest.importorskip("pandas", reason="which nothing could import")
    code = (
        "import sys; from pdsim.cli.main import main; "
        "status = main(['run', 'workload=smoke', '-q']); sys.exit(status or 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
