"""The documentation is right: generated parts are current, commands run, links and file names exist."""

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pdsim.config import keys
from pdsim.core.files import data
from tests.support.documented import blocks, commands
from tools import big_models, reference

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "docs" / "configuration.md"
FILES = ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "data/README.md", "tools/configuration.md")
PAGES = sorted({*(ROOT / name for name in FILES), *ROOT.glob("docs/*.md")} - {BUILT})
WORDS = 21_555  # of all pages; 4,250 are pages, sections and tables that people asked for, such as sizing
MARKS = ("ci: run", "ci: test", "not run: ", "generated ")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def shell(page: Path, run: bool) -> list[str]:
    return [text for mark, language, text in blocks(page) if language == "sh" and bool(mark) != run]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", reference.PARTS)
def test_generated_parts_are_current(part):
    page = ROOT / reference.PARTS[part][0]
    assert reference.rewritten(part) == page.read_text(encoding="utf-8"), "run: python -m tools.reference"


def test_big_models_are_those_of_the_present_model():
    kept = data("reports", "big_models.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert list(csv.reader(kept)) == [[str(value) for value in row] for row in big_models.rows()]


def test_the_configuration_page_lists_keys_of_every_group(tmp_path):
    text = reference.build(tmp_path).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \| [^|]+ \| [^|]+ \| ", text, re.MULTILINE)
    listed = {key for row in rows for key in re.findall(r"`([^`]*)`", row)}
    assert {key.name for key in keys.known()} | {"experiment.deployment"} <= listed
    groups = re.findall(r"^### `([\w=]+)`$", text, re.MULTILINE)
    assert {"backend", "kv", "live", "workload", "experiment=serve", "experiment=validate"} <= set(groups)
    assert len(rows) > 500
    assert re.findall(r"^.*\|  \|$", text, re.MULTILINE) == []  # a key without a meaning


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [p for p in PAGES if shell(p, run=True)], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_runs(page, tmp_path):
    """The blocks of a page run in order in one folder; a block that is not run has a mark with the reason."""
    for name in ("conf", "data", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    for text in shell(page, run=True):
        run(text, tmp_path)


def run(script: str, folder: Path) -> str:
    """Run *script*, commands of a page, in *folder* and return what it prints."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


TWO_KINDS = "'experiment.prefill_hw=[8xb200,8xh20]' hw.price=4 'experiment.prefill_prices=[6,2]'"
CHOSEN = "experiment.deployment=disaggregated 'experiment.prefill_tp=[2]' 'experiment.decode_tp=[2]' hw.price=4"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "number", "added", "left_out"),  # the text block, and what prose before it does to its command
    [
        ("deployments", 0, "", ""),
        ("deployments", 1, "", ""),
        ("sizing", 0, "", ""),
        ("sizing", 1, TWO_KINDS, ""),
        ("sizing", 2, "", ""),
        ("sizing", 3, "", CHOSEN),
        ("sizing", 4, "", ""),
    ],
)
def test_a_page_shows_what_its_commands_print(name, number, added, left_out, tmp_path):
    page, script, pairs = ROOT / "docs" / f"{name}.md", "", []
    for _, language, text in blocks(page):
        script = text if language == "sh" else script
        pairs += [(script, text)] if language == "text" else []
    script, text = pairs[number]
    assert added in page.read_text(encoding="utf-8")
    for word in left_out.split():
        assert word in script
        script = script.replace(word, "")
    printed = " ".join(run(f"{script.rstrip()} {added}", tmp_path).split())
    lines = [re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*") for line in text.splitlines()]
    assert [line for line in lines if not re.search(line, printed)] == [], printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_that_are_not_run_compose(tmp_path, monkeypatch, pdsim_says):
    """Unknown keys and options fail when the configuration is printed, on the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()  # the folder that pages name for a reader's own configuration
    for command in (each for page in PAGES for text in shell(page, run=False) for each in commands(text)):
        typed = re.match(r"python -m pdsim (?=run |validate )", command)
        if typed and "FOLDER" not in command and "NAME" not in command:
            words = [
                word for word in shlex.split(command[typed.end() :]) if not word.startswith(("target=", "launch."))
            ]
            status, _, stderr = pdsim_says(*words, "--cfg", "job")
            assert status == 0, f"{command}\n{stderr}"


def test_blocks_have_known_marks_and_ci_reads_the_readme():
    marks = {page: [mark for mark, _, _ in blocks(page) if mark] for page in PAGES}
    assert [mark for each in marks.values() for mark in each if not mark.startswith(MARKS)] == []
    assert [mark for mark in marks[ROOT / "README.md"] if mark.startswith("ci:")] == ["ci: run", "ci: test"]
    assert "<!-- ci: $1 -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_link_leads_to_a_file_and_a_heading():
    for page in PAGES:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                name, _, heading = target.partition("#")
                file = page.parent / name if name else page
                assert file.exists(), f"{page}: {target}: no such file"
                assert not heading or heading in headings(file), f"{page}: {target}: no such heading"


def headings(page: Path) -> set[str]:
    """Return the anchors of *page* as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_every_file_that_is_named_exists():
    name = re.compile(r"`((?:pdsim|backends|experiments|benchmarks|tools|tests|conf|data|docs)/[\w./-]+\.\w+)`")
    for page in PAGES:
        paths = {ROOT / each for each in name.findall(page.read_text(encoding="utf-8"))} - {BUILT}
        assert {path for path in paths if not path.exists()} == set(), page


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("walk", "most"), [("request", 60), ("chunk", 21), ("number", 5)])
def test_a_walk_passes_as_many_files_as_documented(walk, most):
    command = [sys.executable, "-m", "tools.walks", walk]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240).stdout
    files = len(printed.splitlines()) - 1
    row = re.search(rf"^\| `{walk}`: .*\| (\d+) \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    assert files <= most, printed
    assert abs(files - int(row[1])) <= 3, printed


def test_pages_write_keys_in_full():
    """So that searching finds them; a last part without a dot, an underscore or a value can be another word."""
    known = {key.name for key in keys.known()}
    groups = {name.rpartition(".")[0] for name in known} | {name.split(".")[0] for name in known}
    ends = {name.split(".", at)[at] for name in known for at in range(1, name.count(".") + 1)}
    for page in PAGES:
        spans = re.findall(r"`([a-z_][\w.]*)(=[^`]*)?`", page.read_text(encoding="utf-8"))
        names = {name for name, value in spans if value or {".", "_"} & set(name)}
        assert (names & ends) - known - groups - {"decode_batch"} == set(), page


def test_the_documentation_stays_short():
    words = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(words.values()) <= WORDS, words
