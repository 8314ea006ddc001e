"""A bundle's network as a file that others run: ONNX, or ``torch.export``."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sparkdl.config import require
from sparkdl.errors import BundleError
from sparkdl.estimator.outputs import OutputModule, OutputSpec
from sparkdl.estimator.summary import training_of
from sparkdl.features.fitted import Features
from sparkdl.interchange.served import signature_of
from sparkdl.models.bundle import Bundle, load_bundle
from sparkdl.models.calling import Arguments, formed
from sparkdl.models.preprocessing import features_of
from sparkdl.models.signature import Signature, TensorField
from sparkdl.storage import TEMPORARY, Storage, storage_errors

__all__ = ["Exported", "Format", "Port", "export_bundle"]

Format = Literal["onnx", "torch"]

ROWS = "rows"
"""The dimension of the batch."""

SIZES = (3, 1, 7)
"""Rows of the batches on which file and bundle are compared; the first is the one that the network is traced with."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far an answer may be from the bundle's, as a share of the largest number in it or of 1."""
_LARGE = 1_500_000_000
"""Bytes of weights from which on an ONNX file, which may have 2 GiB, keeps them in a file of their own."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """A tensor that enters or leaves an exported network.

    Attributes:
        name: of it.
        dtype: torch's name of the element type.
        shape: sizes, and names of the dimensions that vary.
        columns: of an input, the columns that it is packed from, in order.
        form: of an input of varying length, what it holds, see ``models.calling``.
        meaning: of an output: ``value``, ``classes`` (one number a class), ``logit`` or ``probability``; None if nobody
            knows.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    columns: tuple[str, ...] = ()
    form: str = ""
    meaning: str | None = None


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was exported, as the JSON beside the file holds it.

    Attributes:
        format: ``"onnx"`` or ``"torch"``.
        file: its name.
        bundle: content hash of the bundle.
        inputs: in the order in which the network takes them.
        outputs: in the order in which it returns them.
        columns: that sparkdl makes the columns of the inputs from, and that are not exported; empty where the inputs
            are packed from a table's columns as they are.
        features: hash of the features that do that; None without.
        rows: of the batches that were compared.
        largest_difference: from the bundle's answers, of all of them.
    """

    format: str
    file: str
    bundle: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    columns: tuple[str, ...] = ()
    features: str | None = None
    rows: tuple[int, ...] = SIZES
    largest_difference: float = 0.0


class _Network(nn.Module):
    """A bundle's module as plain tensors in, plain tensors out."""

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        labels = [field.name for field in signature.outputs]
        self.model = OutputModule(model, labels, [OutputSpec(label) for label in labels])
        self.call = signature.call
        self.names = [field.name for field in signature.inputs]
        self.beside = [field.name for field in signature.inputs if field.of]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs in the order of the signature."""
        arguments = Arguments.of(self.call, dict(zip(self.names, tensors, strict=True)), self.beside)
        answer: tuple[Tensor, ...] = self.model(*arguments.positional, **arguments.named)
        return answer


def export_bundle(
    bundle: str | Storage,
    target: str | Storage,
    *,
    format: Format,
    expected_hash: str | None = None,
    allow_pickle: bool = False,
    trusted: Sequence[str] = (),
) -> Exported:
    """Export the network of a bundle.

    In the file the number of rows may vary; ``<target>.json`` has names, types and shapes of what goes in and out, and
    of which columns. What is exported is the network: tensors in, its own outputs out. What makes tensors of raw
    columns (features) and classes of outputs stays sparkdl's, and the JSON says so. Before a file gets its name it has
    answered as the bundle does, on batches of several sizes.

    Files are only written here: loading a ``.pt2`` file of somebody else runs what its author wrote.

    Args:
        bundle: its folder.
        target: the file to write; ``<target>.json`` is written beside it.
        format: ``"onnx"``, or ``"torch"`` for ``torch.export`` (``.pt2``).
        expected_hash: as ``load_bundle`` takes it.
        allow_pickle: likewise.
        trusted: likewise.

    Raises:
        ConfigError: the format is unknown, its packages are not installed, one of the files is there already, or the
            bundle has no signature.
        BundleError: the bundle cannot be loaded; or torch cannot export its network, or exports one that answers
            otherwise.
        StorageError: it cannot be written there.
    """
    require(format in get_args(Format), f"format={format!r} is not one of {get_args(Format)}: choose one of these")
    if format == "onnx":
        absent = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        require(not absent, f"ONNX needs {', '.join(absent)}, not installed here: pip install 'sparkdl[onnx]'")
    where = Storage.of(target)
    name = where.uri.rpartition("/")[2]
    beside = ("json", "data") if format == "onnx" else ("json",)
    for goal in (where, *(where.sibling(f"{name}.{ending}") for ending in beside)):
        require(not goal.exists(), f"{goal.uri} exists already: choose another file, or delete that one")
    loaded = load_bundle(bundle, expected_hash=expected_hash, allow_pickle=allow_pickle, trusted=trusted)
    signature, features = signature_of(loaded.info), features_of(loaded.info, functions=False)
    _check_forms(loaded.info.uri, signature)
    network = _Network(loaded.model, signature).eval()
    batches = _batches(network, MadeUp.of(signature, features, loaded.model))
    with tempfile.TemporaryDirectory(prefix="sparkdl-export-") as folder, _quiet():
        file = Path(folder) / name
        outputs = _output_names(signature)
        try:
            run = _WRITERS[format](network, batches[0][0], signature, outputs, file)
            difference = max(_difference(answer, run(inputs)) for inputs, answer in batches)
        except Exception as cause:  # of every type, from deep within torch or the runtime
            reason = " ".join(str(cause).split())
            raise BundleError(
                f"torch cannot export the network of {loaded.info.uri} to {format} ({type(cause).__name__}: "
                f"{reason[:200]}): write its forward without decisions that depend on numbers, or keep to the bundle"
            ) from cause
        exported = _described(loaded, name, format, features, batches[0], difference)
        _write(Path(folder), where, exported)
    return exported


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's words to its own developers, about packages that are not installed and names that will change."""
    logs = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _check_forms(uri: str, signature: Signature) -> None:
    jagged = [field.name for field in signature.inputs if field.form == "jagged"]
    if jagged:
        raise BundleError(
            f"the network of {uri} takes {jagged} as nested tensors, which neither format holds: let its forward take "
            "the padded tensor and a mask"
        )


def _batches(network: nn.Module, made: MadeUp) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """Batches of several sizes, each with the network's own answer."""

    def answered(rows: int, rows_made: MadeUp) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        inputs = rows_made.tensors(rows, seed=rows)
        with torch.inference_mode():
            return inputs, tuple(network(*inputs))

    try:
        return [answered(rows, made) for rows in SIZES]
    except (IndexError, RuntimeError):  # numbers that the network does not know: 0 it does
        zeros = MadeUp(signature=made.signature, ids={name: torch.tensor(1) for name in made.ids})
        return [answered(rows, zeros) for rows in SIZES]


Run = Callable[[tuple[Tensor, ...]], Sequence[Tensor]]


def _traced(network: nn.Module, inputs: tuple[Tensor, ...], signature: Signature) -> Any:
    names = dimensions(signature)
    dimensions_by_name = {name: torch.export.Dim(name, min=1) for varying in names for name in varying.values()}
    shapes = tuple({axis: dimensions_by_name[name] for axis, name in varying.items()} for varying in names)
    try:
        return torch.export.export(network, inputs, dynamic_shapes=(shapes,), strict=False)
    except Exception as refusal:
        try:  # which reads the code instead of running it, and so lets len(x) vary; it understands less of Python
            return torch.export.export(network, inputs, dynamic_shapes=(shapes,), strict=True)
        except Exception:
            raise refusal from None


def _torch_file(
    network: nn.Module, inputs: tuple[Tensor, ...], signature: Signature, outputs: Sequence[str], file: Path
) -> Run:
    torch.export.save(_traced(network, inputs, signature), file)
    again = torch.export.load(file).module()  # our own file, written a moment ago

    def run(tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
        with torch.inference_mode():
            return list(again(*tensors))

    return run


def _onnx_file(
    network: nn.Module, inputs: tuple[Tensor, ...], signature: Signature, outputs: Sequence[str], file: Path
) -> Run:
    import onnxruntime

    input_names = [field.name for field in signature.inputs]
    program = torch.onnx.export(
        _traced(network, inputs, signature),
        dynamo=True,
        input_names=input_names,
        output_names=list(outputs),
        verbose=False,
    )
    assert program is not None
    reserved_names = {*input_names, *outputs}  # names that a value inside of the network must not have
    for node in program.model.graph:
        for number, value in enumerate(node.outputs):
            if value.name in reserved_names and value not in program.model.graph.outputs:
                value.name = f"{node.name or value.name}/{number}"
    size = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    program.save(str(file), external_data=size > _LARGE)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    used = [argument.name for argument in session.get_inputs()]

    def run(tensors: tuple[Tensor, ...]) -> Sequence[Tensor]:
        feed = dict(zip(input_names, (tensor.numpy() for tensor in tensors), strict=True))
        answer = session.run(list(outputs), {name: feed[name] for name in used})
        return [torch.from_numpy(output) for output in answer]

    return run


_WRITERS: dict[str, Callable[..., Run]] = {"onnx": _onnx_file, "torch": _torch_file}


def _output_names(signature: Signature) -> list[str]:
    """The names of the outputs; one that is called as an input is gets another."""
    input_names = {field.name for field in signature.inputs}
    return [f"{field.name}__output" if field.name in input_names else field.name for field in signature.outputs]


def _difference(expected: Sequence[Tensor], answered: Sequence[Tensor]) -> float:
    """The largest difference of two answers.

    Raises:
        ValueError: they are not the same answer.
    """
    largest = 0.0
    for output, answer in zip(expected, answered, strict=True):
        if output.shape != answer.shape:
            raise ValueError(f"it answers {tuple(answer.shape)} where the bundle answers {tuple(output.shape)}")
        if not output.numel():
            continue
        exact, exported = output.double(), answer.double()
        odd = ~torch.isfinite(exact)
        if not torch.equal(torch.nan_to_num(exact[odd], 0.5), torch.nan_to_num(exported[odd], 0.5)):
            raise ValueError("it answers other numbers where the bundle's are not finite")
        apart = float((exact - exported)[~odd].abs().max()) if not odd.all() else 0.0
        allowed = _TOLERANCE.get(output.dtype, 0.0) * max(1.0, float(exact[~odd].abs().max()) if not odd.all() else 0.0)
        if not apart <= allowed:
            raise ValueError(f"for {len(output)} rows it is {apart:g} beside the bundle, and {allowed:g} is rounding")
        largest = max(largest, apart)
    return largest


def _described(
    loaded: Bundle, name: str, format: str, features: Features | None, batch: Any, difference: float
) -> Exported:
    signature, meanings = signature_of(loaded.info), training_of(loaded.info).meanings or {}
    inputs = tuple(
        Port(
            name=field.name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(varying.get(axis, size) for axis, size in enumerate(tensor.shape)),
            columns=field.columns,
            form=field.form,
        )
        for field, tensor, varying in zip(signature.inputs, batch[0], dimensions(signature), strict=True)
    )
    outputs = tuple(
        Port(
            name=called,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=(ROWS, *tensor.shape[1:]),
            meaning=meanings.get(field.name),
        )
        for field, called, tensor in zip(signature.outputs, _output_names(signature), batch[1], strict=True)
    )
    return Exported(
        format=format,
        file=name,
        bundle=loaded.info.content_hash,
        inputs=inputs,
        outputs=outputs,
        columns=() if features is None else features.columns,
        features=None if features is None else features.hash,
        largest_difference=difference,
    )


def _write(folder: Path, target: Storage, done: Exported) -> None:
    """Copy what lies in ``folder`` beside and to ``target``: weights, the file itself, then its description."""
    for path in sorted(folder.iterdir(), key=lambda file: file.name == done.file):
        goal = target.sibling(path.name)
        work = target.sibling(f"{TEMPORARY}{uuid.uuid4().hex}") if target.renames else goal
        with storage_errors(goal.uri, "write"), path.open("rb") as source, work.open_output() as sink:
            shutil.copyfileobj(source, sink, 4 << 20)
        if work is not goal:
            work.move_to(goal)
    text = json.dumps(asdict(done), indent=1) + "\n"
    target.sibling(f"{done.file}.json").write_if_absent(text.encode())


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """How rows are made up.

    Attributes:
        signature: of the network.
        ids: by input of whole numbers, the numbers that there are, for each element of a row or for all of them.
    """

    signature: Signature
    ids: dict[str, Tensor]

    @staticmethod
    def of(signature: Signature, features: Features | None, model: nn.Module) -> MadeUp:
        """For the inputs of a network."""
        cardinalities = {} if features is None else {tensor.name: tensor.cardinalities for tensor in features.inputs}
        tables = [
            layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        ]
        most = torch.tensor(min(tables, default=2))
        ids = {}
        for field in signature.inputs:
            counted = [size for column in field.columns for size in cardinalities.get(column, ())]
            ids[field.name] = torch.tensor(counted) if counted else most
        return MadeUp(signature=signature, ids=ids)

    def tensors(self, rows: int, seed: int) -> tuple[Tensor, ...]:
        """The inputs of ``rows`` rows in the order of the signature, in the forms that the network asks for."""
        draw = torch.Generator().manual_seed(seed)
        longest = 3 + rows % 4
        padded: dict[str, Tensor] = {}
        valid: dict[str, Tensor | None] = {}
        for field in self.signature.inputs:
            if not field.columns:
                continue
            shape = (rows, *(longest if size is None else size for size in field.shape))
            padded[field.name] = self._drawn(field, shape, draw)
            valid[field.name] = None
            if None in field.shape:
                lengths = torch.randint(1, longest + 1, (rows, 1), generator=draw)
                lengths[0] = longest
                mask = torch.arange(longest) < lengths
                valid[field.name] = mask
                padded[field.name] *= mask.reshape(*mask.shape, *[1] * (len(shape) - 2))
        tensors = []
        for field in self.signature.inputs:
            owner = self.signature.owner(field) or field
            form = field.form or ("mask" if owner is not field else "padded" if None in field.shape else "")
            tensors.append(formed(form, padded[owner.name], valid[owner.name]))
        return tuple(tensors)

    def _drawn(self, field: TensorField, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
        dtype: torch.dtype = getattr(torch, field.dtype)
        if dtype.is_floating_point:
            return torch.randn(shape, generator=draw).to(dtype)
        if dtype == torch.bool:
            return torch.rand(shape, generator=draw) < 0.5
        most = self.ids[field.name].clamp(max=torch.iinfo(dtype).max)
        return (torch.rand(shape, generator=draw) * most).to(dtype)


def dimensions(signature: Signature) -> list[dict[int, str]]:
    """The names of the dimensions that vary, by input in the order of the signature."""
    names = []
    for position, field in enumerate(signature.inputs):
        owner = signature.owner(field) or field
        length = f"length_{position if owner is field else signature.inputs.index(owner)}"
        if field.form == "flat":
            names.append({0: f"elements_{position}"})
        elif field.form in ("lengths", "offsets"):
            names.append({0: ROWS})
        else:
            of = owner.shape if owner is field else owner.shape[:1]
            varying = {axis: length for axis, size in enumerate(of, 1) if size is None}
            names.append({0: ROWS, **varying})
    return names
