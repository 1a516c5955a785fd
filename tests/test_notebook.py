"""The notebook in `examples/` runs from its first cell to its last, and draws."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.timeout(900)
NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebook" / "pdsim.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")  # results are kept there
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    return client.execute(), folder


def test_every_cell_runs_and_the_results_are_kept(executed):
    notebook, folder = executed
    assert len(list((folder / "results").iterdir())) == 1 + 2 * 3  # the run and the sweep
    assert all(cell.outputs for cell in notebook.cells if cell.cell_type == "code")


def test_tables_and_figures_are_shown(executed):
    kinds = [
        output.data.keys() for cell in executed[0].cells for output in cell.get("outputs", ()) if "data" in output
    ]
    assert sum("text/html" in kind for kind in kinds) == 2
    assert sum("image/png" in kind for kind in kinds) == 2


def test_the_notebook_is_kept_without_outputs():
    code = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
