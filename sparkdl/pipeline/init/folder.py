"""The folder of a new pipeline: its file, a model stub, a test, a schedule, and a page that says what to do."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path

from sparkdl.errors import ConfigError, ConflictError
from sparkdl.storage import Storage

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_MODEL = '''\
"""A network of your own for {name}: change it, and take the # before `model:` in {name}.yaml away.

`features` says what the model gets and has to say: features["inputs"] with "name", "shape" and, of ids,
"cardinalities"; features["labels"] with "outputs", "mean" and "deviation". Try it with `pytest {test}`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def network(features: dict, width: int = 64) -> torch.nn.Module:
    """What `model: {module}:network` names; further arguments come from `model: {{arguments: ...}}`."""
    return Network(features, width)


class Network(nn.Module):
    """Numbers as they are, ids as embeddings, two layers over all of it."""

    def __init__(self, features: dict, width: int) -> None:
        super().__init__()
        self.inputs = features["inputs"]
        self.outputs = [label["outputs"] for label in features["labels"]]
        self.tables = nn.ModuleList(
            nn.ModuleList(nn.Embedding(count, 8) for count in each.get("cardinalities", ())) for each in self.inputs
        )
        entering = sum(_width(each) for each in self.inputs)
        self.layers = nn.Sequential(
            nn.Linear(entering, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, sum(self.outputs)),
        )
        scales = [(each["mean"], each["deviation"]) for each in features["labels"] for _ in range(each["outputs"])]
        self.register_buffer("scales", torch.tensor(scales))  # a regression starts at the training rows' mean

    def forward(self, row: dict[str, Tensor]) -> Tensor | tuple[Tensor, ...]:
        """Predict: (rows, outputs) of the label, or a tuple of one such a label."""
        entering = []
        for each, tables in zip(self.inputs, self.tables):
            values = row[each["name"]]
            if not tables:
                values = values.float() / 255 if values.dtype == torch.uint8 else values.float()
                entering.append(values.reshape(len(values), -1))
            elif each["shape"]:
                entering += [table(ids) for table, ids in zip(tables, values.long().unbind(1))]
            else:  # lists of ids: the mean of their embeddings
                there = row[each["name"] + "_mask"].unsqueeze(-1)
                entering.append((tables[0](values.long()) * there).sum(1) / there.sum(1).clamp(min=1))
        mean, deviation = self.scales.unbind(1)
        answer = self.layers(torch.cat(entering, dim=1)) * deviation + mean
        return answer if len(self.outputs) == 1 else torch.split(answer, self.outputs, dim=1)


def _width(each: dict) -> int:
    sizes = each.get("cardinalities", ())
    return 8 * len(sizes) if sizes else int(torch.tensor(each["shape"]).prod())
'''

_OWN_MODEL = '''\
"""The network of {name}, sparkdl's own as it stood when this was written: yours from now on.

`model: {module}:network` in {name}.yaml names it. Try it with `pytest {test}`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def network(
    features: Mapping[str, Any], width: int = 192, depth: int = 3, dropout: float = 0.0, members: int = 4
) -> torch.nn.Module:
    """What `model: {module}:network` names; its arguments come from `model: {{arguments: ...}}`."""
    return TabularEnsemble(features, width=width, depth=depth, dropout=dropout, members=members)


{source}
'''
_NETWORKS = "sparkdl.models.networks"
_PLAIN_NETWORK = ("TabularNet", "_Block")
"""What of the module of networks the ensemble does not need."""

_TEST = '''\
"""The file of {name} is sound, and so is the model beside it: `pytest {test}`, without Spark."""

from __future__ import annotations

from pathlib import Path

import torch

from sparkdl.pipeline import Pipeline

FILE = Path(__file__).parent / "{name}.yaml"


def test_the_file_is_sound_and_the_source_has_its_columns() -> None:
    Pipeline.load(FILE).check()


def test_the_model_says_one_finite_number_an_output() -> None:
    from {module} import network

    example = Pipeline.load(FILE).example(rows=4)
    model = network(example.features).eval()
    with torch.no_grad():
        answer = model(example.inputs)
    answers = answer if isinstance(answer, tuple) else (answer,)
    for found, outputs in zip(answers, example.outputs.values(), strict=True):
        assert found.shape == (4, outputs)
        assert torch.isfinite(found).all()
'''

_SCHEDULE = """\
# Every night at 3:17: `crontab -l | cat - {schedule} | crontab -`. What has not changed is not done again, so that
# more often does no harm; a run that finds another one active leaves (exit code 30).
# With mail and further tries where a run failed: jobs/schedule/ of sparkdl, for Airflow, Databricks and YARN as well.
17 3 * * * cd {folder} && timeout --foreground -k 10m 4h sparkdl run {name}.yaml --ok-when-nothing >> {name}.log 2>&1
"""

_README = """\
# {name}

| file | what it is |
|---|---|
| `{name}.yaml` | the pipeline: source, features, label, split, training, when a model is published |
| `{module}.py` | {what} |
| `{test}` | whether file and network are sound: `pytest {test}` |
| `{schedule}` | a line for cron |

    sparkdl check {name}.yaml     # is the file sound, does the source have its columns
    sparkdl plan {name}.yaml      # what a run would do, and why
    sparkdl run {name}.yaml       # from the source to predictions
    sparkdl status {name}.yaml    # where it stands

What runs leave lies in `sparkdl-data/` beside the file; `root` in the file says otherwise.
"""


def new_folder(place: str) -> tuple[Storage, str]:
    """The folder that ``place`` names, and the pipeline's name, which is the last part of it.

    Raises:
        ConfigError: it cannot be a pipeline's name, or there is something at that place.
    """
    folder = Storage.of(Path(place).expanduser())
    name = folder.uri.rpartition("/")[2]
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a pipeline: use letters, digits, - and _, such as churn")
    if folder.exists():
        raise ConfigError(f"{folder.uri} is there already, and init overwrites nothing: choose another name")
    return folder, name


def module_of(name: str) -> str:
    """The Python module of the model stub."""
    plain = re.sub(r"\W", "_", name).lower()
    return f"{plain if plain[0].isalpha() else f'p_{plain}'}_model"


def write_folder(folder: Storage, name: str, text: str, *, with_model: bool = False) -> list[str]:
    """Write all files, and the folder appears with them; return their names.

    Args:
        folder: to write to.
        name: of the pipeline.
        text: of its file.
        with_model: whether the module beside it is sparkdl's own network, in full, in place of a short one.
    """
    module = module_of(name)
    words = {"name": name, "module": module, "test": f"test_{module}.py", "schedule": f"{name}.cron"}
    path = str(folder.local_path())
    words["what"] = (
        "the network, sparkdl's own written out: the pipeline uses this one"
        if with_model
        else "a network of your own to begin with; the pipeline uses sparkdl's until you name it"
    )
    words["folder"] = shlex.quote(path).replace("%", r"\%")
    files = {
        f"{name}.yaml": text,
        f"{module}.py": _OWN_MODEL.format(**words, source=_own_network()) if with_model else _MODEL.format(**words),
        words["test"]: _TEST.format(**words),
        words["schedule"]: _SCHEDULE.format(**words),
        "README.md": _README.format(**words),
    }
    try:
        for file, content in files.items():
            folder.child(file).write_if_absent(content.encode())
    except ConflictError:  # somebody else is writing there at this moment
        raise
    except BaseException:
        folder.delete(recursive=True)
        raise
    return list(files)


def _own_network() -> str:
    """The source of sparkdl's own network and its parts; torch is not imported for it."""
    module = importlib.util.find_spec(_NETWORKS)
    assert module is not None
    assert module.origin is not None
    source = Path(module.origin).read_text(encoding="utf-8")
    body = ast.parse(source).body
    first_definition = next(at for at, node in enumerate(body) if isinstance(node, ast.Assign | ast.AnnAssign)) + 1
    definitions = [
        ast.get_source_segment(source, node) or ""
        for node in body[first_definition:]
        if not (isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in _PLAIN_NETWORK)
    ]
    spaced = [f"\n\n{text}" if text.startswith(("class ", "def ")) else text for text in definitions]
    return "\n".join(spaced).lstrip("\n")
