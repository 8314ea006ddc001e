"""The page that explains every parameter, written from the table that the code itself uses.

Enters: ``spec.SPECS``. Leaves: Markdown. ``python -m sparkdl.estimator.params.parameter_table`` rewrites
``estimator/PARAMETERS.md``, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sparkdl.estimator.params.spec import ALIASES, MODEL_SPECS, SPECS, ParamSpec

__all__ = ["PAGE", "render", "write"]

PAGE = Path(__file__).parents[1] / "PARAMETERS.md"

_INTRODUCTION = """# Parameters of TorchEstimator and TorchModel

Written by `python -m sparkdl.estimator.params.parameter_table`; do not edit. "Peer" says whose code uses the name:
Horovod's TorchEstimator, Spark ML, or sparkdl itself. A value of None means the default. What is refused raises a
`ConfigError` that names what to use instead.
"""


def render() -> str:
    """Return the whole page."""
    both = "\n".join(f"- `{ours}` or `{alias}`: giving both is an error." for ours, alias in ALIASES.items())
    return (
        f"{_INTRODUCTION}\n## TorchEstimator\n\n{_table(SPECS)}\n"
        f"### Two names for one thing\n\n{both}\n\n## TorchModel\n\n{_table(MODEL_SPECS)}"
    )


def write() -> Path:
    """Write the page beside this file; return its path."""
    PAGE.write_text(render(), encoding="utf-8")
    return PAGE


def _table(specs: Iterable[ParamSpec]) -> str:
    lines = ["| parameter | default | unit or kind | effect | peer |", "|---|---|---|---|---|"]
    for spec in specs:
        cells = (f"`{spec.name}`", f"`{spec.default!r}`", spec.unit, spec.effect, spec.peer)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(write())
