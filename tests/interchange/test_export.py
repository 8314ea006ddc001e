"""Networks as files that others run: the same answers for any number of rows, or one sentence and no file."""

from __future__ import annotations

import json
import resource

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.errors import BundleError, ConfigError, IntegrityError, StorageError
from sparkdl.interchange import export as exporting
from sparkdl.interchange.export import Exported, MadeUp, dimensions, export_bundle
from sparkdl.models.adjusted import adjusted
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.models.preprocessing import features_of
from sparkdl.models.signature import Signature, TensorField
from sparkdl.storage import Storage

pytest.importorskip("onnxruntime")

OUTPUT = (TensorField(name="y"),)
PAIR = (TensorField(name="x", shape=(2,), columns=("a", "b")),)
IDS = TensorField(name="ids", dtype="int64", shape=(None,), columns=("ids",), form="flat")


class Decides(nn.Module):
    """What it computes depends on the numbers."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x):
        return self.line(x) if x.sum() > 0 else -self.line(x)


class Flattens(nn.Module):
    """Asks for ``len(x)``, a number that running the code with one batch would freeze."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x):
        return self.line(x.reshape(len(x), 2))


class Bag(nn.Module):
    """Takes lists of ids row behind row; calls its answer as its input, and gives a second one."""

    def __init__(self):
        super().__init__()
        self.table, self.line = nn.EmbeddingBag(11, 4, mode="sum"), nn.Linear(4, 1)

    def forward(self, ids, ids_offsets):
        found = self.table(ids, ids_offsets)
        return {"ids": self.line(found), "width": found.argmax(1)}


class Jagged(nn.Module):
    def forward(self, ids_jagged):
        return ids_jagged


def saved(tmp_path, model, signature):
    torch.manual_seed(0)
    save_bundle(model.eval(), str(tmp_path / "bundle"), signature=signature, factory=type(model), arguments={})
    return str(tmp_path / "bundle")


def answers(file, feeds):
    """What onnxruntime makes of ``feeds``, by the names in the JSON beside the file."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file))
    names = [one["name"] for one in json.loads((file.parent / f"{file.name}.json").read_text())["outputs"]]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("rows", [1, 4, 300])
def test_made_up_rows_are_such_as_the_network_takes(bundles, rows):
    loaded = load_bundle(str(bundles / "everything"))
    features = features_of(loaded.info)
    made = MadeUp.of(loaded.signature, features, loaded.model)
    tensors = dict(zip((one.name for one in loaded.signature.inputs), made.tensors(rows, seed=1), strict=True))
    assert loaded.model(tensors).shape == (rows, 1)
    ids = {one.name: one.cardinalities for one in features.inputs if one.cardinalities}
    for name, counts in ids.items():
        assert (tensors[name] < torch.tensor(counts)).all()
    assert not (tensors["history"] * ~tensors["history_mask"]).any()
    assert tensors["history_mask"].any(1).all()
    for tensor, varying in zip(made.tensors(rows, seed=1), dimensions(loaded.signature), strict=True):
        assert varying[0] == "rows"
        assert len(tensor) == rows


@pytest.mark.parametrize("format", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_network_is_exported_with_what_goes_in_and_out(bundles, tmp_path, format):
    bundle = load_bundle(str(bundles / "plain"))
    file = tmp_path / "kind.net"
    done = export_bundle(str(bundles / "plain"), str(file), format=format)
    assert done.largest_difference < 1e-5
    told = json.loads((tmp_path / "kind.net.json").read_text())
    assert (told["format"], told["file"], told["bundle"]) == (format, file.name, bundle.info.content_hash)
    (given,), (answer,) = told["inputs"], told["outputs"]
    assert (given["name"], given["dtype"], given["shape"], given["columns"]) == (
        "features", "float32", ["rows", 2], ["a", "b"],
    )  # fmt: skip
    assert (answer["name"], answer["shape"], answer["meaning"]) == ("kind", ["rows", 3], "classes")
    assert (told["columns"], told["features"], told["rows"]) == ([], None, [3, 1, 7])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kind.net", "kind.net.json"]
    x = torch.randn(50, 2)
    with torch.no_grad():
        expected = bundle.model(x)
    if format == "onnx":
        found = torch.from_numpy(answers(file, {"features": x.numpy()})["kind"])
    else:
        (found,) = torch.export.load(file).module()(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("format", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_quantiles_are_in_order_and_logits_calibrated_in_the_file(bundles, tmp_path, format):
    file = tmp_path / "adjusted.net"
    export_bundle(str(bundles / "adjusted"), str(file), format=format)
    model, x = load_bundle(str(bundles / "adjusted")).model, torch.randn(200, 2)
    with torch.no_grad():
        late, kind = adjusted(model, ())({"numbers": x})
    assert (late.diff(dim=1) < 0).any()  # or nothing was to be sorted
    if format == "onnx":
        by_name = answers(file, {"numbers": x.numpy()})
        found = torch.from_numpy(by_name["late"]), torch.from_numpy(by_name["kind"])
    else:
        found = torch.export.load(file).module()(x)
    torch.testing.assert_close(tuple(found), (late.sort(dim=1).values, kind / 2.5), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_weights_that_are_too_large_for_an_onnx_file_lie_beside_it(bundles, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "_LARGE", 0)
    export_bundle(str(bundles / "plain"), str(tmp_path / "kind.onnx"), format="onnx")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["kind.onnx", "kind.onnx.data", "kind.onnx.json"]
    x = torch.randn(5, 2)
    with torch.no_grad():
        expected = load_bundle(str(bundles / "plain")).model(x)
    np.testing.assert_allclose(answers(tmp_path / "kind.onnx", {"features": x.numpy()})["kind"], expected, atol=1e-6)


def test_nothing_that_is_there_is_replaced(bundles, tmp_path):
    pytest.importorskip("onnxscript")
    for name in ("kind.onnx", "kind.onnx.json", "kind.onnx.data"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ConfigError, match=f"{name} exists already: choose another file, or delete that one"):
            export_bundle(str(bundles / "plain"), str(tmp_path / "kind.onnx"), format="onnx")
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


def test_a_full_disk_is_one_sentence_and_leaves_no_file(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "net.onnx").write_bytes(bytes(200_000))
    target = Storage.of(tmp_path / "there" / "net.onnx")
    exported = Exported(format="onnx", file="net.onnx", bundle="", inputs=(), outputs=())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*/there/net\.onnx: the device or quota is full"):
            exporting._write(tmp_path / "made", target, exported)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.slow
def test_a_network_that_asks_for_the_length_of_a_tensor_is_exported_too(tmp_path):
    bundle = saved(tmp_path, Flattens(), Signature(inputs=PAIR, outputs=OUTPUT))
    assert export_bundle(bundle, str(tmp_path / "net"), format="torch", trusted=[__name__]).rows == (3, 1, 7)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_the_network_behind_features_takes_masks_and_says_which_columns_are_left_to_sparkdl(bundles, tmp_path, format):
    file = tmp_path / "net"
    done = export_bundle(str(bundles / "everything"), str(file), format=format)
    assert done.columns == ("age", "city", "history", "note", "embedding", "photo", "born", "seen")
    assert len(done.features or "") == 64
    ports = {one.name: one for one in done.inputs}
    assert ports["history"].shape == ports["history_mask"].shape
    assert ports["history"].shape[0] == "rows"
    assert isinstance(ports["history"].shape[1], str)
    assert (ports["history"].form, ports["history_mask"].dtype) == ("padded", "bool")
    assert [(one.name, one.shape) for one in done.outputs] == [("y", ("rows", 1))]


@pytest.mark.slow
def test_lists_row_behind_row_and_outputs_that_are_called_as_inputs(tmp_path):
    offsets = TensorField(name="ids_offsets", dtype="int64", form="offsets", of="ids")
    outputs = (TensorField(name="ids"), TensorField(name="width", dtype="int64"))
    bundle = saved(tmp_path, Bag(), Signature(inputs=(IDS, offsets), outputs=outputs))
    done = export_bundle(bundle, str(tmp_path / "bag.onnx"), format="onnx", trusted=[__name__])
    assert [one.name for one in done.outputs] == ["ids__output", "width"]
    feeds = {"ids": np.array([1, 2, 3, 10]), "ids_offsets": np.array([0, 0, 3])}
    found = answers(tmp_path / "bag.onnx", feeds)
    with torch.no_grad():
        expected = load_bundle(bundle, trusted=[__name__]).model(*map(torch.from_numpy, feeds.values()))
    np.testing.assert_allclose(found["ids__output"], expected["ids"].numpy(), atol=1e-6)
    np.testing.assert_array_equal(found["width"], expected["width"].numpy())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_network_that_decides_by_numbers_is_refused_in_one_sentence(tmp_path, format):
    bundle = saved(tmp_path, Decides(), Signature(inputs=PAIR, outputs=OUTPUT))
    with pytest.raises(BundleError, match=rf"torch cannot export the network of .*bundle to {format} \(") as refused:
        export_bundle(bundle, str(tmp_path / "net"), format=format, trusted=[__name__])
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("wrong", ["number", "shape", "rows"])
def test_a_file_that_answers_otherwise_is_not_written(bundles, tmp_path, monkeypatch, wrong):
    def writes(network, given, signature, outputs, file):
        file.write_text("a file")

        def run(tensors):
            (answer,) = network(*tensors)
            if wrong == "rows" and len(answer) == 7:
                return [answer + 0.01]
            return [answer + 0.001] if wrong == "number" else [answer[:, :2]] if wrong == "shape" else [answer]

        return run

    monkeypatch.setitem(exporting._WRITERS, "torch", writes)
    said = {"number": "for 3 rows it is 0.001", "shape": r"answers \(3, 2\) where the bundle answers \(3, 3\)"}
    with pytest.raises(BundleError, match=said.get(wrong, "for 7 rows it is 0.01")):
        export_bundle(str(bundles / "plain"), str(tmp_path / "net"), format="torch")
    assert not list(tmp_path.iterdir())


def test_what_is_not_finite_has_to_stay_so():
    nan, inf = float("nan"), float("inf")
    one = [torch.tensor([1.0, nan, inf])]
    assert exporting._difference(one, [torch.tensor([1.0, nan, inf])]) == 0
    for other in ([1.0, nan, -inf], [1.0, 0.0, inf], [nan, nan, inf]):
        with pytest.raises(ValueError, match=r"not finite|beside the bundle"):
            exporting._difference(one, [torch.tensor(other)])


def test_nested_tensors_are_refused(tmp_path):
    field = TensorField(name="ids_jagged", shape=(None,), columns=("ids",), form="jagged")
    bundle = saved(tmp_path, Jagged(), Signature(inputs=(field,), outputs=OUTPUT))
    with pytest.raises(BundleError, match=r"takes \['ids_jagged'\] as nested tensors, which neither format holds"):
        export_bundle(bundle, str(tmp_path / "net"), format="torch", trusted=[__name__])


def test_bad_words_are_refused_before_anything_is_traced(bundles, tmp_path, monkeypatch):
    plain, there = str(bundles / "plain"), tmp_path / "there"
    with pytest.raises(ConfigError, match="format='tflite' is not one of"):
        export_bundle(plain, str(there), format="tflite")
    with pytest.raises(BundleError, match=r"holds no bundle\.json"):
        export_bundle(str(tmp_path), str(there), format="torch")
    with pytest.raises(IntegrityError, match="was expected"):
        export_bundle(plain, str(there), format="torch", expected_hash="0" * 64)
    (tmp_path / "there.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"there\.json exists already: choose another file"):
        export_bundle(plain, str(there), format="torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"ONNX needs onnx, onnxscript, onnxruntime, not installed here: pip install"):
        export_bundle(plain, str(there), format="onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
