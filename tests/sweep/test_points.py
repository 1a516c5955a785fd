"""Overrides become points: combined or zipped, each once, named by what it runs, composed as `run` composes."""

import msgspec
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from pdsim.cli.help import parse
from pdsim.cli.sweep import space_of
from pdsim.config import compose as compositions
from pdsim.config.compose import CommandLine, compose, load, ready, resolved
from pdsim.core.errors import ConfigError
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


def test_a_name_is_of_the_content_and_not_of_the_folder():
    (one,), (other,), (more,) = swept("seed=1", "output=a"), swept("seed=1", "output=b"), swept("seed=2")
    assert one.name == other.name != more.name
    assert len(one.name) == 12


def by_hydra(words):
    return load(resolved(compositions._raw(CommandLine(), ready(words))), words)


@pytest.mark.parametrize(
    "words",
    [
        (
            "experiment=transfer",
            "kv.pool=1GiB",
            "seed=3",
            "kv.pool=2GiB",
            "experiment.size=[4KiB,8KiB]",
            "output='a b'",
        ),
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
