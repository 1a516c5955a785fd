"""The notebook in `examples/` runs from its first cell to its last, and draws."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "notebook" / "pdsim.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_cell_runs_shows_something_and_is_kept_without(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert len(list((tmp_path / "results").iterdir())) == 1 + 2 * 3  # the run and the sweep
    assert all(cell.outputs for cell in code)
    kinds = [output.data.keys() for cell in code for output in cell.outputs if "data" in output]
    assert sum("text/html" in kind for kind in kinds) == 2
    assert sum("image/png" in kind for kind in kinds) == 2
