"""What a bundle from a stranger can do to its reader: nothing, whatever it says and however its hashes fit."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.errors import BundleError, ConfigError, IntegrityError
from sparkdl.models.bundle import load_bundle, read_bundle, save_bundle
from sparkdl.models.copies import copy_bundle
from sparkdl.models.folder import content_hash_of
from sparkdl.models.registry import ModelRegistry


@pytest.fixture
def folder(tmp_path):
    save_bundle(nn.Linear(2, 1), str(tmp_path / "bundle"))
    return tmp_path / "bundle"


def forge(folder, model=None, **changes):
    """Change a bundle as its author could, with a hash that fits."""
    document = json.loads((folder / "bundle.json").read_text()) | changes
    document["model"] = document["model"] if model is None else {**model, "weights": document["model"]["weights"]}
    document["content_hash"] = content_hash_of(document)
    (folder / "bundle.json").write_text(json.dumps(document))


def called(target, **arguments):
    return {"kind": "import", "target": target, "arguments": arguments}


def layer(name, **arguments):
    return {"kind": "structure", "tree": {"class": name, "arguments": arguments}}


def encoder(inner, **fields):
    return {"kind": "structure", "tree": {"class": "TransformerEncoder", "layer": inner, **fields}}


def bushy(path="layers.0", depth=9):
    """A module whose parts are named again and again: 20 of them at the first level, 400 at the second, ..."""
    if not depth:
        return {"class": "ReLU", "arguments": {}}
    first = bushy(f"{path}.0", depth - 1)
    again = [[str(n), {"class": "Sequential", "children": [["0", {"same_as": f"{path}.0"}]]}] for n in range(1, 20)]
    return {"class": "Sequential", "children": [["0", first], *again]}


BUSHY = bushy()


def deep(levels):
    """A module in a module in a module, each of which takes the name of the one inside it."""
    chain = [["0", {"class": "Sequential", "children": [["0", {"same_as": "0"}]]}]] * levels
    return {"kind": "structure", "tree": {"class": "Sequential", "children": [["0", {"class": "ReLU"}], *chain]}}


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A package that is installed, and leaves a trace when it is imported."""
    (tmp_path / "strange_package.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
        "from os import system\nfrom torch import nn\nfrom torch.nn import Linear\n"
        "class Net(nn.Linear):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "imported"
    sys.modules.pop("strange_package", None)


def test_a_recipe_cannot_bring_its_own_trust(folder, tmp_path):
    inner = {"path": "subprocess:run", "arguments": {"args": ["touch", str(tmp_path / "ran")]}}
    for loader in ("sparkdl.models.importing:build", "sparkdl.models.importing:make"):
        forge(folder, called(loader, **inner, trusted=["subprocess"]))
        with pytest.raises(BundleError, match="sparkdl itself"):
            load_bundle(str(folder))
        with pytest.raises(ConfigError, match="'sparkdl' cannot be allowed"):
            load_bundle(str(folder), trusted=["sparkdl"])
    assert not (tmp_path / "ran").exists()


def test_nothing_is_imported_before_it_is_allowed(folder, stranger):
    forge(folder, called("strange_package:Net", in_features=2, out_features=1))
    with pytest.raises(BundleError, match=r"importing strange_package runs.*allow_imports\('strange_package'\)"):
        load_bundle(str(folder))
    assert not stranger.exists()
    assert "strange_package" not in sys.modules
    with sparkdl.allow_imports("strange_package"):
        assert type(load_bundle(str(folder)).model).__name__ == "Net"
    assert stranger.exists()


@pytest.mark.parametrize("name", ["system", "Linear", "nn.Linear", "Net.__init__", "Net.forward", "__builtins__", "nn"])
def test_only_what_an_allowed_module_defines_is_made(folder, stranger, name):
    forge(folder, called(f"strange_package:{name}", command="true"))
    with pytest.raises(BundleError):
        load_bundle(str(folder), trusted=["strange_package"])


@pytest.mark.parametrize(
    "target", ["shutil:os.system", "torch.hub:load", "torch.nn.modules.module:Module", "torch:load"]
)
def test_the_standard_library_and_the_rest_of_torch_are_out_of_reach(folder, target):
    forge(folder, called(target))
    with pytest.raises(BundleError):
        load_bundle(str(folder), trusted=["torchmetrics"])


@pytest.mark.parametrize("package", ["os", "shutil", "torch", "torch.hub", "sparkdl.models", "", "a b", "a..b"])
def test_what_can_run_anything_cannot_be_allowed_even_by_the_reader(package):
    with pytest.raises(ConfigError), sparkdl.allow_imports(package):
        pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (layer("Linear", in_features=2**20, out_features=2**24), "shape"),
        (layer("Linear", in_features=2**61, out_features=2**61), "fails with the arguments"),
        (layer("Linear", in_features=2**20, out_features=2**24, device="cpu"), "its device"),
        (called("torch.nn.modules.linear:Linear", in_features=2**20, out_features=2**24, device="cpu"), "its device"),
        (called("torch.nn.modules.linear:Linear", in_features=2**20, out_features=2**24), "shape"),
        (layer("LSTM", input_size=1, hidden_size=1, num_layers=10**9), "far more layers than its 2 tensors"),
        (layer("Transformer", d_model=8, nhead=2, num_encoder_layers=10**9), "far more layers than its 2 tensors"),
        (layer("Transformer", d_model=8, nhead=2, num_decoder_layers=[10**9]), "fails with the arguments"),
        (called("torch.nn.modules.rnn:LSTM", input_size=1, hidden_size=1, num_layers=10**9), "far more layers"),
        (called("torch.nn.modules.transformer:Transformer", d_model=8, nhead=2, num_encoder_layers=10**9), "far more"),
        (called("torch.nn.modules.rnn:RNNBase", mode="GRU", input_size=1, hidden_size=1, num_layers=10**9), "far more"),
        (encoder({"class": "Transformer", "arguments": {}}, num_layers=99_998), "far more layers"),
        (encoder({"class": "ReLU", "arguments": {}}, num_layers=10**12), "far more layers"),
        (encoder(encoder({"class": "ReLU"}, num_layers=99)["tree"], num_layers=99), "far more layers"),
        (layer("TransformerEncoder", encoder_layer=2, num_layers=10**9), "far more layers"),
        (layer("TransformerDecoder", decoder_layer={}, num_layers=10**9), "far more layers"),
        (encoder(BUSHY, num_layers=1), "far more layers"),
        (encoder(BUSHY, num_layers=1, arguments={"strange": 1}), "far more layers"),
        (deep(2_000), "far more layers|nested too deep"),
        (layer("AdaptiveLogSoftmaxWithLoss", in_features=1, n_classes=9, cutoffs=[*range(300)]), "300 values"),
        (layer("LazyLinear", out_features=1), "no layer"),
        (layer("Module"), "no layer"),
        (layer("functional"), "no layer"),
        (layer("Linear", in_features=2, out_features=1, bias=False), "'bias' of shape None"),
        ({"kind": "structure", "tree": bushy("")}, "not before it"),
        ({"kind": "structure", "tree": {"same_as": "x"}}, "not before it"),
        ({"kind": "structure", "tree": {"class": "Sequential", "children": [["0", {"same_as": ""}]]}}, "not before it"),
        ({"kind": "structure", "tree": {"class": "Linear", "children": []}}, "no container"),
        ({"kind": "structure", "tree": {"class": "Sequential", "children": [["a.b", {"class": "ReLU"}]]}}, "child"),
        ({"kind": "structure", "tree": {"class": "Linear", "code": "1"}}, "unknown field"),
        ({"kind": "structure", "tree": {"class": "Sequential", "children": [["a", 3]]}}, "Expected `object`"),
        ({"kind": "exec"}, "model.kind"),
        ({"kind": "structure"}, "Expected `object`, got `null`"),
    ],
)
def test_a_structure_takes_no_memory_before_it_is_known_to_be_that_of_the_weights(folder, model, message):
    with pytest.raises((BundleError, IntegrityError), match=message):  # noqa: PT012
        forge(folder, model)
        load_bundle(str(folder))


def test_the_bound_of_layers_leaves_other_threads_and_the_callers_profiler_alone(tmp_path):
    import cProfile

    save_bundle(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 20), str(tmp_path / "b"))
    with cProfile.Profile() as profile:
        load_bundle(str(tmp_path / "b"))
        assert sys.getprofile() is not None
        nn.Sequential(*(nn.ReLU() for _ in range(10_000)))
    assert any("load_bundle" in str(entry.code) for entry in profile.getstats())


def test_weights_of_another_kind_of_number_are_refused(folder):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(1, 2, dtype=torch.int64), "bias": torch.ones(1)}, folder / "weights.safetensors")
    rehash(folder)
    with pytest.raises(BundleError, match=r"'weight' of torch.float32, the saved weights torch.int64"):
        load_bundle(str(folder))


def rehash(folder, name="weights.safetensors"):
    import hashlib

    data = (folder / name).read_bytes()
    forge(folder, files={name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}})


@pytest.mark.parametrize("aliases", [{"bias": "weight"}, {"other": "weight"}, {"other": "none"}])
def test_tied_names_are_those_of_the_model(folder, aliases):
    document = json.loads((folder / "bundle.json").read_text())
    forge(folder, {**document["model"]})
    document["model"]["weights"] = {"aliases": aliases, "channels_last": False}
    document["content_hash"] = content_hash_of(document)
    (folder / "bundle.json").write_text(json.dumps(document))
    with pytest.raises(BundleError):
        load_bundle(str(folder))


@pytest.mark.parametrize(
    "name", ["/{}/outside", "../outside", "a/../../outside", "weights.safetensors/../../outside", ""]
)
def test_a_file_outside_is_neither_read_nor_overwritten(folder, tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    name = name.replace("/{}", str(tmp_path))
    good = json.loads((folder / "bundle.json").read_text())["files"]["weights.safetensors"]
    with pytest.raises(IntegrityError, match=r"\$.files"):  # noqa: PT012
        forge(folder, files={name: good, "weights.safetensors": good})
        ModelRegistry(str(tmp_path / "registry")).publish("m", str(folder))
    assert outside.read_bytes() == b"mine"
    assert not (tmp_path / "registry" / "artifacts").exists()


@pytest.mark.parametrize("how", ["link out", "pipe", "device", "directory"])
def test_only_a_file_of_the_folder_itself_is_read(folder, tmp_path, how):
    weights, outside = folder / "weights.safetensors", tmp_path / "outside"
    weights.rename(outside)
    if how == "link out":
        weights.symlink_to(outside)
    elif how == "pipe":
        os.mkfifo(weights)
    elif how == "device":
        weights.symlink_to("/dev/zero")
    else:
        weights.mkdir()
    for use in (load_bundle, lambda uri: copy_bundle(read_bundle(uri), str(tmp_path / "copy"))):
        with pytest.raises(IntegrityError):
            use(str(folder))
    assert not (tmp_path / "copy").exists()


def test_a_document_that_is_no_plain_file_or_too_large_is_refused(folder):
    document = folder / "bundle.json"
    with document.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(IntegrityError, match="at most"):
        read_bundle(str(folder))
    document.unlink()
    os.mkfifo(document)
    with pytest.raises(IntegrityError, match="no regular file"):
        read_bundle(str(folder))


def test_a_remote_file_is_not_copied_beyond_its_recorded_size(folder):
    import fsspec

    info = save_bundle(nn.Linear(3, 3), "memory://hostile/m")
    fsspec.filesystem("memory").pipe_file("/hostile/m/weights.safetensors", b"x" * (info.bytes + 1))
    with pytest.raises(IntegrityError, match="bytes"):
        load_bundle("memory://hostile/m")
