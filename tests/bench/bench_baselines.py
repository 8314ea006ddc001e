"""What a course begins with, as ``notebooks/distribute.ipynb`` has it: a line fitted in every way, a network trained.

The notebook is the benchmark: it is run a few times, each time in a kernel of its own, and the seconds and differences
of its two tables are printed, one JSON line a way.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks/distribute.ipynb"
ROUNDS = 3
PRINTED = "import json; print(json.dumps([lines.T.to_dict('list'), networks.T.to_dict('list')]))"


def tables(folder):
    """By way, seconds and the largest difference, of the line and of the network."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(PRINTED))
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    return json.loads(notebook.cells[-1].outputs[-1]["text"])


@pytest.mark.bench
def test_baselines(tmp_path):
    rounds = [tables(tmp_path) for _ in range(ROUNDS)]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    for number, what in enumerate(("line", "network")):
        for way in rounds[0][number]:
            seconds, differences = zip(*(of_round[number][way] for of_round in rounds), strict=True)
            line = {"workload": "baselines", "model": what, "way": way, "seconds": round(statistics.median(seconds), 4)}
            line["spread"] = [round(min(seconds), 4), round(max(seconds), 4)]
            line |= {"largest_difference": max(differences), "git": commit, "torch": torch.__version__}
            print(
                json.dumps(
                    line
                    | {
                        "python": platform.python_version(),
                        "cores": os.cpu_count(),
                        "load": round(os.getloadavg()[0], 1),
                    }
                ),
                flush=True,
            )
