"""The points of a sweep and the table of their metrics."""

import io

import msgspec
import pyarrow.parquet as pq
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pdsim.cli.help import parse
from pdsim.cli.sweep import space_of
from pdsim.config import compose as compositions
from pdsim.config.compose import CommandLine, compose, load, ready, resolved
from pdsim.core.errors import ConfigError
from pdsim.sweep.collect import LEDGER, Ledger, points, show, table, write
from pdsim.sweep.points import Axis, axes, combinations

QUICK = ("experiment=transfer", "experiment.size=4KiB", "experiment.repeat=2")


def swept(*words):
    return space_of(*parse("sweep", [*QUICK, *words])).points()


@pytest.mark.parametrize(
    ("words", "choices"),
    [
        (("hw=8xh20,8xh200", "seed=1,2"), [("8xh20", "1"), ("8xh20", "2"), ("8xh200", "1"), ("8xh200", "2")]),
        (("seed=range(1,3)", "kv.page_size=choice(1,16)"), [("1", "1"), ("1", "16"), ("2", "1"), ("2", "16")]),
        (("hw=8xh20,8xh200", "seed=1,2", "--zip", "hw,seed"), [("8xh20", "1"), ("8xh200", "2")]),
        (("kv.pool=1GiB,1024MiB,2GiB",), [("1GiB",), ("2GiB",)]),  # of equal content
    ],
)
def test_the_last_key_changes_fastest(words, choices):
    assert [tuple(point.choice.values()) for point in swept(*words)] == choices


def test_a_list_is_one_value():
    sizes = [point.config.experiment.size for point in swept("experiment.size=[4KiB,8KiB],64KiB")]
    assert sizes == [(4096, 8192), (65536,)]


def test_a_name_is_of_content_and_not_folder():
    (one,), (other,), (more,) = swept("seed=1", "output=a"), swept("seed=1", "output=b"), swept("seed=2")
    assert one.name == other.name != more.name
    assert len(one.name) == 12


def by_hydra(words):
    return load(resolved(compositions._raw(CommandLine(), ready(words))), words)


@pytest.mark.parametrize(
    "words",
    [
        ("experiment=transfer", "kv.pool=1GiB", "kv.pool=2GiB", "experiment.size=[4KiB,8KiB]", "output='a b'"),
        ("compute.scale=1.5", "compute={scale: 2.0}"),
        ("compute={scale: 2.0}", "compute.scale=1.5"),
        ("workload=poisson", "workload.input_mean=${workload.output_mean}", "workload.output_mean=7"),
        ("hw.nic.rate=100Gbps", "hw=8xh200"),
    ],
)
def test_values_set_in_a_composition_are_those_of_hydra(words):
    assert compose(words) == compose(words) == by_hydra(words)


@pytest.mark.parametrize(
    "text", ["0", "-7", "007", "1_000", "1.5", "-0.25", "1e5", "abc", "/a/b-c.d", "True", "null", "NaN", "infinite"]
)
def test_a_simple_value_is_read_as_hydra_reads_it(text):
    (parsed,) = OverridesParser.create().parse_overrides([f"++seed={text}"])
    key, value = compositions._setting(f"++seed={text}")
    assert (key, type(value), repr(value)) == ("seed", type(parsed.value()), repr(parsed.value()))


def test_hydra_composes_once_until_a_file_changes(tmp_path, monkeypatch):
    def composes(*_):
        raise AssertionError("composed anew")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compositions._composed.clear()
    first = compose(["hw=2xh200", "seed=3"])
    monkeypatch.setattr(compositions, "_raw", composes)
    compositions._composed.clear()
    assert compose(["hw=2xh200", "seed=3"]) == first
    (kept,) = tmp_path.rglob("*.composed")
    _, values = msgspec.msgpack.decode(kept.read_bytes())
    for content in (msgspec.msgpack.encode(("of other files", values)), b"damaged"):
        kept.write_bytes(content)
        compositions._composed.clear()
        with pytest.raises(AssertionError, match="composed anew"):
            compose(["hw=2xh200", "seed=3"])


def test_axes_are_steps_of_keys():
    assert axes({"a": ["1", "2"], "b": ["x", "y"]}, [["a", "b"]]) == [Axis(("a", "b"), (("1", "x"), ("2", "y")))]
    assert list(combinations([])) == [{}]
    with pytest.raises(ConfigError, match="a is zipped twice"):
        axes({"a": ["1"], "b": ["1"]}, [["a", "b"], ["a", "b"]])


DEFINITIONS = {"bw_gbs": "bytes over time"}


def row(name, rate, status="ok", evidence="assumed", hw="toy", **changes):
    about = {"point": name, "folder": name, "status": status, "error": "", "experiment": "transfer", "hw": hw}
    about |= {"backend": "fast", "target": "model", "seed": 7, "gpus": 2, "evidence": evidence}
    return about | {"overrides": {"workload.rate": str(rate), "hw": hw}, "metrics": {"bw_gbs": 2.5}} | changes


def test_a_table_has_swept_keys_first_and_all_metrics(tmp_path):
    (kept,) = pq.read_table(write(tmp_path, [row("a1", 2.5)], DEFINITIONS)).to_pylist()
    assert kept == {
        "point": "a1", "folder": "a1", "status": "ok", "error": "", "experiment": "transfer", "hw": "toy",
        "backend": "fast", "target": "model", "seed": 7, "gpus": 2, "evidence": "assumed", "workload.rate": 2.5,
        "bw_gbs": 2.5,
    }  # fmt: skip
    write(tmp_path, [row("a1", 1), row("a2", 2, hw="b", evidence="none")], DEFINITIONS)
    shown = table(tmp_path)
    assert list(shown.columns) == ["hw", "workload.rate", "status", "evidence", "bw_gbs"]
    assert shown.rows == [("toy", 1, "ok", "assumed", 2.5), ("b", 2, "ok", "none", None)]  # no evidence, no number


def test_a_killed_sweep_has_the_rows_it_appended(tmp_path):
    book = Ledger(tmp_path)
    book.append(row("a1", 1), DEFINITIONS)
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"point": "a2", "sta')
    assert points(tmp_path)["point"].to_pylist() == ["a1"]
    again = Ledger(tmp_path)
    again.append(row("a3", 3), DEFINITIONS)
    assert points(tmp_path)["point"].to_pylist() == ["a1", "a3"]


def test_a_ledger_that_was_changed_is_refused(tmp_path):
    (tmp_path / LEDGER).write_text("{}\n[1]\n")
    with pytest.raises(ConfigError, match=r"points\.jsonl is not what a sweep writes: 'point'; it was changed"):
        points(tmp_path)


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_infeasible_points_are_counted_and_shown_on_request(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    nothing = dict.fromkeys(("experiment", "backend", "target", "seed", "gpus", "evidence"))
    refused = [row(f"b{n}", n, "infeasible", error="8 GPUs needed", metrics={}, **nothing) for n in range(3, 6)]
    write(tmp_path, [row("a1", 1), row("a2", 2, metrics={"bw_gbs": 5.0}), *refused], DEFINITIONS)
    screen, pipe, all_of_it = Screen(), io.StringIO(), io.StringIO()
    show(tmp_path, screen)
    show(tmp_path, pipe)
    show(tmp_path, all_of_it, verbose=True)
    for file in screen, pipe:
        lines = file.getvalue().splitlines()
        assert [line.split() for line in lines if " ok " in line] == [["1", "ok", "2.500"], ["2", "ok", "5.000"]]
        assert f"3 more cannot be run (pdsim show -v {tmp_path}), such as: 8 GPUs needed" in lines
        assert "hidden" not in file.getvalue()
        assert lines[-1].endswith(f" report {tmp_path}")  # transfers have no goodput to rank
    assert all_of_it.getvalue().count("8 GPUs needed") == 3


def test_the_printed_table_has_the_first_metrics(tmp_path):
    rows = [row(f"a{n}", n, metrics={"goodput": 1.0 * n} | {f"m{k}": 1.0 * n for k in range(20)}) for n in (1, 2)]
    write(tmp_path, rows, {})
    pipe = io.StringIO()
    show(tmp_path, pipe)
    assert pipe.getvalue().splitlines()[2].split() == ["rate", "status", "goodput", *(f"m{k}" for k in range(7))]
    assert f"13 more metrics: pdsim show -v {tmp_path}\n" in pipe.getvalue()
