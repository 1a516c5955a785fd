"""`pdsim report`: pages of runs, sweeps and validations that need nothing beside them, and figures as files."""

import json
import re
import sys
from html import unescape
from pathlib import Path

import pytest

from pdsim.cli.main import main
from pdsim.results.drawing import Figure, Marks, Panel, Scale, image, plotly_panel
from pdsim.results.kept import KeptRun
from pdsim.results.record import Table
from pdsim.results.report.figures import claims, figures
from pdsim.results.report.page import Content, page
from pdsim.sweep import pareto
from pdsim.validation import agreement
from tests.support.browser import MISSING, Browser

SMALL = ["hw=8xh200", "workload.count=12", "--quiet"]
PULLED = ["hw=2xh200", "model=qwen3-8b", "parallel=tp1", "workload=smoke", "engine=vllm", "backend=nixl", "--quiet"]
COMMANDS = {
    "run": ["run", *SMALL, "kv.staging=true", "parallel.decode.tp=2", "samples=50"],
    "pulled": ["run", *PULLED],
    "transfer": ["run", "experiment=transfer", "experiment.patterns=[pair]", "--quiet"],
    "capacity": ["run", "experiment=capacity", "experiment.processes=1", *PULLED[:2], "workload=smoke", "--quiet"],
    "sweep": ["sweep", *SMALL, "workload.rate=2,8,32", "workload=poisson", "executor.workers=1"],
}
FIGURES = {
    "run": {"latency", "phases", "time", "queues", "transfers", "ranks", "utilisation", "use"},
    "pulled": {"latency", "phases", "time", "queues", "transfers", "ranks", "use"},
    "transfer": {"transfers", "ranks", "use"},
    "sweep": {"knee", "pareto", "keys"},
    "capacity": {"pareto", "latency", "phases", "queues", "time"},
    "validation": {"agreement", "errors"},
}
READING = re.compile(r'<p class="reading">([^<]+)</p>')


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind that there is a report of."""
    output = tmp_path_factory.mktemp("results")
    for name, words in COMMANDS.items():
        assert main([*words, f"output={output / name}"]) == 0
    stored = Path(__file__).resolve().parents[2] / "data" / "validation" / "nixl-2xh200"
    return {name: next((output / name).iterdir()) for name in COMMANDS} | {"validation": stored}


@pytest.fixture(scope="module")
def pages(folders, tmp_path_factory):
    target = tmp_path_factory.mktemp("pages")
    for name, folder in folders.items():
        assert main(["report", str(folder), "-o", str(target / f"{name}.html")]) == 0
    return {name: target / f"{name}.html" for name in folders}


SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


@pytest.mark.parametrize("name", FIGURES)
def test_a_page_has_its_figures_and_refers_to_nothing_outside(pages, name):
    from plotly import graph_objects

    text = pages[name].read_text(encoding="utf-8")
    panels, library, _ = SCRIPT.findall(text)
    rest = SCRIPT.sub("", text)
    sections = set(re.findall(r'<section id="(\w+)"', rest))
    assert sections - {"summary", "tables", "evidence", "provenance"} == FIGURES[name]
    assert all(address.startswith(("#", "data:")) for address in re.findall(r' (?:src|href)="([^"]*)"', rest))
    assert "plotly.js v" in library[:200]
    assert len(text) - len(library) < 600_000
    assert len(json.loads(panels)) == rest.count('class="plot"') > 0
    assert len(READING.findall(text)) >= len(FIGURES[name])
    for panel in json.loads(re.sub(r'"@\w+"', '"#123456"', panels)):
        axes = panel["layout"]["xaxis"], panel["layout"]["yaxis"]
        assert all(axis["title"]["text"] or axis.get("ticktext") for axis in axes)
        graph_objects.Figure(panel)  # refuses a property or a value that plotly would ignore


def test_text_of_a_run_is_escaped_in_its_page():
    table = Table("a < b", {"<i>": "x > y"}, [["</script>"], [None], [0.5]])
    name = "<!--<script></script>"
    points = Marks("points", [1.0], [1.0], texts=["<b>\nq"])
    figure = Figure("f", "F", "r", [Panel(Scale(name), Scale("y"), [points])])
    text = page(Content(over="", title="<b>", lines=["<u>"], tables=[table], figures=[figure]))
    assert "<u>" not in text
    assert "<i>" not in text
    data = SCRIPT.findall(text)[0]  # with <!--<script> in it, the element would end where the page does
    assert "<" not in data
    (panel,) = json.loads(data)
    assert unescape(panel["layout"]["xaxis"]["title"]["text"]) == name
    assert panel["data"][0]["text"] == ["&lt;b&gt;<br>q"]
    assert "<td>&lt;/script&gt;</td>" in text


def test_a_reproduced_report_has_simulated_beside_measured_points():
    rows = [("handoff", "toy", "model", "1to2", 4.0, 0.5), ("handoff", "toy", "real", "1to2", 3.0, 0.25)]
    rows += [("handoff", "toy", "model", "8to8", 8.0, 2.0), ("ttft", "toy", "model", "2to1", 5.0, None)]
    heads = ("claim", "machine", "target", "at", "before", "after")
    points = [dict(zip(heads, row, strict=True)) | {"unit": "s"} for row in rows]
    left, right, *others = claims({"handoff": "faster", "ttft": "sooner"}, points).panels
    assert (left.title, right.title) == ("faster: simulated", "faster: measured")
    assert left.y.labels == right.y.labels == ["toy: 1to2", "toy: 8to8"]
    assert left.x == right.x == Scale("time", "s", log=True, low=0.2, high=10.0)
    assert [(m.name, m.x, m.y) for m in right.series[1:]] == [("before", [3.0], [0.0]), ("after", [0.25], [0.0])]
    assert len(others) == 2


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.mark.skipif(MISSING, reason="Chromium or Playwright is not installed")
class TestInChromium:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", FIGURES)
    def test_all_is_drawn_without_a_complaint_and_without_the_network(self, browser, pages, name):
        browser.open(pages[name].as_uri())
        assert browser.complaints == []
        assert browser.requests == []

    def test_logarithmic_axes_have_units_and_the_page_fits_a_phone(self, browser, pages):
        browser.open(pages["run"].as_uri(), width=390)
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        labels = browser.evaluate(
            "[...document.querySelectorAll('.plot')].filter((each) => each._fullLayout.xaxis.type === 'log')"
            ".flatMap((each) => [...each.querySelectorAll('.xtick text')].map((label) => label.textContent))"
        )
        assert len(labels) > 8
        assert {label[-1] for label in labels} == {"s", "B"}

    def test_the_switch_changes_the_theme_and_paper_is_light(self, browser, pages):
        shown = "getComputedStyle(document.body).backgroundColor + document.querySelector('.xtick text').style.fill"
        browser.open(pages["validation"].as_uri(), dark=True)
        dark = browser.evaluate(shown)
        browser.evaluate("document.getElementById('theme').click()")  # auto, light
        browser.wait(f"{shown} !== {json.dumps(dark)}")
        light = browser.evaluate(shown)
        browser.evaluate("document.getElementById('theme').click()")
        browser.wait(f"{shown} === {json.dumps(dark)}")
        browser.evaluate("dispatchEvent(new Event('beforeprint'))")
        browser.wait(f"{shown} === {json.dumps(light)}")
        browser.evaluate("dispatchEvent(new Event('afterprint'))")
        browser.wait(f"{shown} === {json.dumps(dark)}")
        browser.open(pages["validation"].as_uri())
        assert browser.evaluate(shown) == light


@pytest.mark.slow
def test_every_figure_is_a_file_the_same_each_time(folders):
    drawn = {name: figures(KeptRun(folders[name])) for name in ("run", "pulled", "transfer", "capacity")}
    drawn["sweep"] = pareto.content(folders["sweep"]).figures
    drawn["validation"] = agreement.figures(agreement.compared_in(folders["validation"])[2])
    assert {name: {figure.name for figure in each} for name, each in drawn.items()} == FIGURES
    for each in drawn.values():
        assert all(image(figure, "svg").startswith(b"<?xml") for figure in each)
        assert image(each[0], "svg") == image(each[0], "svg")


def test_a_page_is_report_html_in_the_folder_unless_named(folders):
    assert main(["report", str(folders["run"])]) == 0
    assert (folders["run"] / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "report needs the folder of a run"),
        (("{run}", "{run}"), "report is about one run, sweep or validation, got 2"),
        (("{run}", "--figure", "latencey"), "has no figure 'latencey'; did you mean latency?"),
        (("{run}", "--format", "svg"), "--format is of a figure; name it"),
        (("{run}", "--figure", "latency", "--format", "gif"), "--format must be one of svg, pdf, png, got 'gif'"),
        (("{run}", "-o", "/nowhere/all.html"), "No such file or directory; name a file that can be written with -o"),
        (("{run}", "--slo", "ttft=1s"), "is a run; leave it out, or set slo.ttft when it is run"),
        (("{run}", "--colour"), "unknown option --colour"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(folders, pdsim_says, words, message):
    status, _, said = pdsim_says("report", *(word.format(run=folders["run"]) for word in words))
    assert (status, said.count("\n")) == (2, 1)
    assert message in said


@pytest.mark.parametrize(
    ("library", "words"), [("plotly", ()), ("jinja2", ()), ("matplotlib", ("--figure", "latency"))]
)
def test_a_missing_library_says_what_to_install(folders, pdsim_refuses, monkeypatch, library, words):
    monkeypatch.setitem(sys.modules, library, None)
    said = pdsim_refuses("report", str(folders["run"]), *words)
    assert said == f"pdsim: {[*words, 'report'][0]} needs {library}; pip install 'pdsim[report]'"


def test_a_value_that_is_not_finite_is_a_gap():
    panel = Panel(Scale("x"), Scale("y"), [Marks("line", [1.0, float("nan")], [float("inf"), 2.0])])
    (trace,) = plotly_panel(panel)["data"]
    assert (trace["x"], trace["y"]) == ([1.0, None], [None, 2.0])
    assert image(Figure("gap", "Gap", "", [panel]), "png")
