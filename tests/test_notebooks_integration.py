"""Every notebook runs from top to bottom in a kernel of its own, and uses public names only."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import sparkdl

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
LARGEST_ERROR = {"quickstart": 3.0, "distribute": 0.11}


def code_of(path):
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_public_names_and_stores_no_output(path):
    for node in ast.walk(ast.parse("\n".join(code_of(path)))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sparkdl"):
            assert node.module == "sparkdl"
            assert {alias.name for alias in node.names} <= set(sparkdl.__all__)
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    errors = [
        float(output["data"]["text/plain"])
        for output in shown
        if output.get("data")
        and output.output_type == "execute_result"
        and output["data"]["text/plain"].replace(".", "", 1).isdigit()
    ]
    assert errors, "the notebook ends with an error of the model"
    assert errors[-1] < LARGEST_ERROR[path.stem]
