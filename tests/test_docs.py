"""The documentation is what the program does: generated parts are current, commands run, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tools import reference

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "docs" / "configuration.md"
PAGES = sorted(
    {*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "data/README.md"))}
    | {ROOT / "tools" / "configuration.md", *ROOT.glob("docs/*.md")} - {BUILT}
)
WORDS = 13_000  # of all pages, without what a command writes into them
LONGEST = 120
BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKS = ("ci: run", "ci: test", "not run: ", "generated ")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: Path):
    """Yield the mark, the language and the text of each fenced block."""
    yield from (match.groups(default="") for match in BLOCK.finditer(page.read_text(encoding="utf-8")))


def shell(page: Path, run: bool):
    return [text for mark, language, text in blocks(page) if language == "sh" and bool(mark) != run]


def commands(text: str):
    """Return the commands in *text*, each on one line and without its comment."""
    lines = (re.sub(r"\s+# .*", "", line) for line in text.replace("\\\n", " ").splitlines())
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", reference.PARTS)
def test_what_is_generated_is_current(part):
    page = ROOT / reference.PARTS[part][0]
    assert reference.rewritten(part) == page.read_text(encoding="utf-8"), "run: python -m tools.reference"


def test_the_built_page_lists_keys_of_every_group(tmp_path):
    text = reference.build(tmp_path).read_text(encoding="utf-8")
    assert text.startswith((ROOT / "tools" / "configuration.md").read_text(encoding="utf-8"))
    rows = re.findall(r"^\| `([^`]*)` \| [^|]+ \| [^|]+ \| ", text, re.MULTILINE)
    assert {"target", "hw.nic.rate", "experiment.deployment"} <= set(rows)
    groups = re.findall(r"^### `([\w=]+)`$", text, re.MULTILINE)
    assert {"backend", "kv", "live", "workload", "experiment=serve", "experiment=validate"} <= set(groups)
    assert len(rows) > 500
    assert not LINK.findall(text)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [p for p in PAGES if shell(p, run=True)], ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_runs(page, tmp_path):
    """The blocks of a page run one after the other in one folder; those not run say why before they begin."""
    for name in ("conf", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "120"}
    for text in shell(page, run=True):
        done = subprocess.run(
            ["bash", "-euc", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_that_are_not_run_have_a_reason_and_known_keys(page, tmp_path, monkeypatch, pdsim_says):
    """Their configuration is printed, on the model, which fails for keys and options that there are not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()  # the folder that pages name for a reader's own configuration
    assert [mark for mark, _, _ in blocks(page) if mark and not mark.startswith(MARKS)] == []
    for text in shell(page, run=False):
        for command in commands(text):
            typed = re.match(r"python -m pdsim (?=run |validate )", command)
            if typed and "FOLDER" not in command and "NAME" not in command:
                words = [word for word in shlex.split(command[typed.end() :]) if not word.startswith("target=")]
                status, _, said = pdsim_says(*words, "--cfg", "job")
                assert status == 0, f"{command}\n{said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{target}: no such file"
        assert not heading or heading in headings(file), f"{target}: no such heading"


def headings(page: Path):
    """Return the anchors of *page* as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_every_file_that_is_named_exists():
    named = re.compile(r"`((?:pdsim|backends|experiments|benchmarks|tools|tests|conf|data|docs)/[\w./-]+\.\w+)`")
    for page in PAGES:
        found = {ROOT / name for name in named.findall(page.read_text(encoding="utf-8"))} - {BUILT}
        assert {path for path in found if not path.exists()} == set(), page


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("walk", "most"), [("request", 90), ("chunk", 40), ("number", 13)])
def test_a_walk_passes_no_more_files_than_it_may(walk, most):
    """CONTRIBUTING says how many, give or take what a small change adds or saves."""
    command = [sys.executable, "-m", "tools.walks", walk]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240).stdout
    found = len(printed.splitlines()) - 1
    said = re.search(rf"^\| `{walk}`: .*\| (\d+) \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    assert found <= most, printed
    assert abs(found - int(said[1])) <= 3, printed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_line_is_too_long_but_in_tables_and_commands(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > LONGEST and not line.startswith("|")] == []


def test_the_documentation_stays_short():
    generated = re.compile(r"<!-- (?:generated|mutants).*?<!-- end", re.DOTALL)
    texts = {str(page.relative_to(ROOT)): generated.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
    words = {page: len(re.findall(r"\S*\w\S*", text)) for page, text in texts.items()}
    assert sum(words.values()) <= WORDS, words


def test_ci_finds_its_commands_by_their_marks():
    marks = [mark for mark, language, _ in blocks(ROOT / "README.md") if language == "sh" and mark.startswith("ci:")]
    assert marks == ["ci: run", "ci: test"]
    assert "<!-- ci: $1 -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
