"""Models go out and come back: equal to the bit, without code, and never silently wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import sparkdl
from sparkdl.errors import BundleError, ConfigError, ConflictError, IntegrityError
from sparkdl.models.bundle import Signature, TensorField, load_bundle, read_bundle, save_bundle

SIGNATURE = Signature(
    inputs=(TensorField(name="x", shape=(4,), columns=("a", "b", "c", "d")),),
    outputs=(TensorField(name="y", shape=()),),
    labels=("target",),
)


def tied():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight
    return model


def shared():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def images(model):
    return model, torch.randn(2, 3, 8, 8)


STRUCTURES = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 1, bias=False)),
        torch.randn(3, 4),
    ),
    "cnn": lambda: images(
        nn.Sequential(
            nn.Conv2d(3, 4, (3, 5), stride=2, padding="valid", groups=1, bias=False),
            nn.BatchNorm2d(4, eps=1e-3, momentum=None),
            nn.LeakyReLU(0.2, inplace=True),
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Flatten(),
            nn.Linear(4, 2),
            nn.LogSoftmax(dim=-1),
        )
    ),
    "channels_last": lambda: images(nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)),
    "tied": lambda: (tied(), torch.arange(5)),
    "shared": lambda: (shared(), torch.randn(3, 4)),
    "lstm": lambda: (nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True), torch.randn(2, 5, 4)),
    "gru": lambda: (nn.GRU(4, 6), torch.randn(2, 5, 4)),
    "rnn": lambda: (nn.RNN(4, 6, nonlinearity="relu"), torch.randn(2, 5, 4)),
    "transformer": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True), 2, nn.LayerNorm(8)),
        torch.randn(2, 5, 8),
    ),
    "bf16": lambda: (nn.Sequential(nn.Linear(4, 8), nn.ReLU()).bfloat16(), torch.randn(3, 4).bfloat16()),
    "fp16": lambda: (nn.Sequential(nn.Linear(4, 8)).half(), torch.randn(3, 4).half()),
    "fp64": lambda: (nn.Sequential(nn.Linear(4, 8)).double(), torch.randn(3, 4).double()),
    "empty container": lambda: (nn.Sequential(nn.Linear(4, 8), nn.Sequential(), nn.Linear(8, 1)), torch.randn(3, 4)),
    "padding_idx": lambda: (nn.Sequential(nn.Embedding(9, 3, padding_idx=0), nn.Flatten(0)), torch.arange(9)),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_torch_own_layers_come_back_bit_for_bit(name, tmp_path):
    torch.manual_seed(1)
    model, example = STRUCTURES[name]()
    model.eval()
    info = save_bundle(model, str(tmp_path / "b"), signature=SIGNATURE, example=example)
    assert info.model["kind"] == "structure"
    assert sorted(os.listdir(tmp_path / "b")) == ["bundle.json", "weights.safetensors"]
    state = torch.random.get_rng_state()
    bundle = load_bundle(str(tmp_path / "b"), expected_hash=info.content_hash)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert bundle.signature == SIGNATURE
    assert not bundle.model.training
    assert repr(bundle.model) == repr(model)
    with torch.inference_mode():
        for ours, theirs in zip(_flat(bundle.model(example)), _flat(model(example)), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def _flat(value):
    return [value] if isinstance(value, torch.Tensor) else [leaf for item in value for leaf in _flat(item)]


def gelu_in_the_second_layer():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model.layers[1].activation = nn.functional.gelu
    return model


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (gelu_in_the_second_layer, "layers.1.activation"),
        (lambda: nn.Transformer(8, 2, activation="gelu", batch_first=True), "encoder.layers.0.activation"),
    ],
)
def test_a_setting_that_no_layer_prints_is_refused_where_it_does_not_come_back(make, setting, tmp_path):
    """Without an example nothing else shows that the rebuilt model answers otherwise."""
    with pytest.raises(BundleError, match=f"^the model rebuilt from its structure has another '{setting}"):
        save_bundle(make(), str(tmp_path / "b"))


def test_a_distance_comes_back_with_its_norm(tmp_path):
    save_bundle(nn.PairwiseDistance(1.0, keepdim=True), str(tmp_path / "b"))
    again = load_bundle(str(tmp_path / "b")).model
    assert again(torch.ones(1, 4), torch.zeros(1, 4)).item() == pytest.approx(4, rel=1e-4)


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "refused"])
def test_a_model_that_is_saved_in_training_trains_on_as_it_was(saves, tmp_path):
    """A layer that was frozen by ``eval()`` stays frozen."""
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    if saves:
        save_bundle(model, str(tmp_path / "b"))
    else:
        with pytest.raises(BundleError):
            save_bundle(model, str(tmp_path / "b"), example=torch.zeros(1, 7))
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    save_bundle(tied(), str(tmp_path / "b"))
    assert (tmp_path / "b" / "weights.safetensors").stat().st_size < 2 * 160
    model = load_bundle(str(tmp_path / "b")).model
    assert model[0].weight is model[1].weight
    again = load_bundle(str(save_and_get(shared(), tmp_path / "c"))).model
    assert again[0] is again[2]


def save_and_get(model, path, **more):
    save_bundle(model, str(path), **more)
    return path


def test_equal_models_have_equal_hashes(tmp_path):
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    one = save_bundle(model, str(tmp_path / "a"), signature=SIGNATURE)
    two = save_bundle(model, str(tmp_path / "b"), signature=SIGNATURE)
    assert one.content_hash == two.content_hash
    assert save_bundle(nn.Linear(3, 2), str(tmp_path / "c"), signature=SIGNATURE).content_hash != one.content_hash


TRUSTED = ["own_models_for_bundle"]
OWN = """
    from os import system
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width, depth=1, scale=1.0):
            super().__init__()
            self.width, self.depth = width, depth
            self.factor = scale
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.factor

    class Knows(Net):
        def bundle_arguments(self):
            return {"width": self.width, "depth": self.depth, "scale": self.factor}

    class Terse(Net):
        def __init__(s, width):
            super().__init__(width)

    def make(width) -> Net:
        return Net(width, depth=2)

    def unannotated(width):
        return Net(width)

    class Normed(Net):
        def __init__(self, width):
            super().__init__(width, 2)
            nn.utils.parametrizations.spectral_norm(self.layers[1])

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.zeros(2), persistent=False)
        def forward(self, x):
            return x + self.shift
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_models_for_bundle.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_models_for_bundle

    yield own_models_for_bundle
    sys.modules.pop("own_models_for_bundle", None)


def test_a_class_of_ones_own_is_rebuilt_by_its_path_where_its_package_is_allowed(own, tmp_path, monkeypatch):
    model = own.Net(3, depth=2, scale=2.0)
    x = torch.randn(5, 3)
    save_bundle(
        model, str(tmp_path / "b"), factory=own.Net, arguments={"width": 3, "depth": 2, "scale": 2.0}, example=x
    )
    assert torch.equal(load_bundle(str(tmp_path / "b"), trusted=TRUSTED).model(x), model(x))
    save_bundle(own.Knows(3, 2, 4.0), str(tmp_path / "k"), example=x)
    with sparkdl.allow_imports(*TRUSTED):
        assert load_bundle(str(tmp_path / "k")).model.factor == 4.0
    save_bundle(own.make(3), str(tmp_path / "f"), factory="own_models_for_bundle:make", arguments={"width": 3})
    monkeypatch.setenv("SPARKDL_ALLOW_IMPORTS", "other_package, own_models_for_bundle")
    assert len(load_bundle(str(tmp_path / "f")).model.layers) == 2


def test_arguments_read_from_attributes_count_only_if_the_outputs_agree(own, tmp_path):
    x = torch.randn(5, 3)
    save_bundle(own.Net(3, 2), str(tmp_path / "a"), example=x)  # scale has its default, so it is not missed
    assert load_bundle(str(tmp_path / "a"), trusted=TRUSTED).info.model["arguments"] == {"width": 3, "depth": 2}
    with pytest.raises(BundleError, match=r"answers the example differently.*factory="):
        save_bundle(own.Net(3, 2, scale=3.0), str(tmp_path / "b"), example=x)
    with pytest.raises(BundleError, match="factory="):
        save_bundle(own.Net(3, 2), str(tmp_path / "c"))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__") == ["a"]


def test_a_constructor_may_call_its_self_otherwise(own, tmp_path):
    save_bundle(own.Terse(3), str(tmp_path / "a"), example=torch.ones(1, 3))
    assert load_bundle(str(tmp_path / "a"), trusted=TRUSTED).info.model["arguments"] == {"width": 3}


def test_wrong_arguments_are_refused_when_saving(own, tmp_path):
    with pytest.raises(BundleError, match="shape"):
        save_bundle(own.Net(3), str(tmp_path / "a"), factory=own.Net, arguments={"width": 4})
    with pytest.raises(BundleError, match="fails with the arguments"):
        save_bundle(own.Net(3), str(tmp_path / "a"), factory=own.Net, arguments={"depth": 4})
    with pytest.raises(BundleError, match="JSON"):
        save_bundle(own.Net(3), str(tmp_path / "a"), factory=own.Net, arguments={"width": torch.ones(1)})
    assert not (tmp_path / "a").exists()


def test_tensors_outside_the_state_must_be_the_same_after_rebuilding(own, tmp_path):
    model = own.Hidden()
    save_bundle(model, str(tmp_path / "a"), factory=own.Hidden)
    model.shift.fill_(2.0)
    with pytest.raises(BundleError, match="'shift' outside its state_dict"):
        save_bundle(model, str(tmp_path / "b"), factory=own.Hidden)


def normed():
    return nn.Sequential(
        weight_norm(nn.Linear(4, 8)),
        nn.ReLU(),
        spectral_norm(weight_norm(nn.Linear(8, 8), "bias", None), n_power_iterations=3, eps=1e-6),
        weight_norm(nn.Linear(8, 2), dim=1),
    )


def test_weight_norm_and_spectral_norm_come_back_and_train_alike(tmp_path):
    torch.manual_seed(2)
    model, x = normed(), torch.randn(3, 4)
    info = save_bundle(model, str(tmp_path / "b"), example=x)
    assert info.model["kind"] == "structure"
    again = load_bundle(str(tmp_path / "b")).model
    assert repr(again) == repr(model)
    assert list(again.state_dict()) == list(model.state_dict())
    assert all(map(torch.equal, again.state_dict().values(), model.state_dict().values()))
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert again[2].parametrizations.weight[0].n_power_iterations == 3
    for each in (model, again):
        optimizer = torch.optim.SGD(each.train().parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()
    assert torch.allclose(again.eval()(x), model.eval()(x), rtol=1e-5, atol=1e-6)


def test_parametrizations_come_back_whoever_registered_them(own, tmp_path):
    x = torch.randn(3, 3)
    for name, model in {"outside": own.Net(3), "constructor": own.Normed(3)}.items():
        weight_norm(model.layers[0])
        model.eval()
        save_bundle(model, str(tmp_path / name), factory=type(model), arguments={"width": 3}, example=x)
        again = load_bundle(str(tmp_path / name), trusted=TRUSTED).model
        assert torch.equal(again(x), model(x))
        assert repr(again) == repr(model)
    root = weight_norm(own.Net(3).layers[0])
    assert type(root).__name__ == "ParametrizedLinear"
    save_bundle(root, str(tmp_path / "root"), arguments={"in_features": 3, "out_features": 3}, example=x)
    assert torch.allclose(load_bundle(str(tmp_path / "root")).model(x), root(x))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            lambda: orthogonal(nn.Linear(3, 3)),
            "of its 'weight', and only weight_norm and spectral_norm",
        ),
        (lambda: torch.nn.utils.spectral_norm(nn.Linear(3, 3)), "of torch.nn.utils.parametrizations instead"),
    ],
)
def test_what_cannot_be_described_of_a_normed_layer_is_told_with_what_can(layer, message, tmp_path):
    with pytest.raises(BundleError, match=message):
        save_bundle(nn.Sequential(layer()), str(tmp_path / "a"))


@pytest.mark.parametrize(
    "change", [{"tensor": "nothing.weight"}, {"tensor": "0.bias.x"}, {"dim": 9}, {"n_power_iterations": 10**9}]
)
def test_a_parametrization_that_does_not_fit_is_refused(change, tmp_path):
    save_bundle(nn.Sequential(spectral_norm(nn.Linear(3, 3))), str(tmp_path / "a"))
    (step,) = json.loads((tmp_path / "a" / "bundle.json").read_text())["model"]["parametrizations"]
    with pytest.raises((BundleError, IntegrityError)):  # noqa: PT012
        rewrite(tmp_path / "a", {"parametrizations": [{**step, **change}]})
        load_bundle(str(tmp_path / "a"))


def test_behaviour_that_a_class_does_not_have_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(BundleError, match="_forward_hooks"):
        save_bundle(model, str(tmp_path / "a"))


def test_a_local_class_needs_the_pickle_opt_in_on_both_sides(tmp_path):
    class Local(nn.Module):
        def forward(self, x):
            return x + 1

    with pytest.raises(BundleError, match="allow_pickle"):
        save_bundle(Local(), str(tmp_path / "a"))
    save_bundle(Local(), str(tmp_path / "a"), allow_pickle=True)
    with pytest.raises(BundleError, match="allow_pickle=True"):
        load_bundle(str(tmp_path / "a"))
    assert load_bundle(str(tmp_path / "a"), allow_pickle=True).model(torch.ones(1)).item() == 2
    (tmp_path / "a" / "model.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    with pytest.raises(IntegrityError):
        load_bundle(str(tmp_path / "a"), allow_pickle=True)


@pytest.mark.parametrize("target", ["os:system", "torch.jit:load", "torch.hub:load", "subprocess:Popen", "torch:load"])
def test_a_crafted_bundle_cannot_call_what_makes_no_model(target, tmp_path):
    save_bundle(nn.Linear(1, 1), str(tmp_path / "a"))
    rewrite(tmp_path / "a", {"kind": "import", "target": target, "arguments": {"command": "true"}})
    with pytest.raises(BundleError, match=r"which is .*do not load it"):
        load_bundle(str(tmp_path / "a"))


def rewrite(folder, model=(), **changes):
    """Change the recipe as an attacker would, with a hash that fits."""
    from sparkdl.models.folder import content_hash_of

    document = json.loads((folder / "bundle.json").read_text())
    document["model"] = {**document["model"], **dict(model)}
    document |= changes
    document["content_hash"] = content_hash_of(document)
    (folder / "bundle.json").write_text(json.dumps(document))


def test_a_function_is_called_if_annotated(own, tmp_path):
    path = str(save_and_get(own.make(3), tmp_path / "a", factory=own.make, arguments={"width": 3}))
    assert load_bundle(path, trusted=TRUSTED).model.width == 3
    with pytest.raises(BundleError, match="annotate it"):
        save_bundle(own.unannotated(3), str(tmp_path / "b"), factory=own.unannotated, arguments={"width": 3})
    rewrite(tmp_path / "a", {"target": "own_models_for_bundle:unannotated", "arguments": {"width": 3}})
    with pytest.raises(BundleError, match="annotate it"):
        load_bundle(path, trusted=TRUSTED)


def test_a_missing_module_is_named_with_the_remedy(own, tmp_path, monkeypatch):
    save_bundle(own.Net(3), str(tmp_path / "a"), factory=own.Net, arguments={"width": 3})
    monkeypatch.delitem(sys.modules, "own_models_for_bundle")
    (tmp_path / "own_models_for_bundle.py").unlink()
    with pytest.raises(BundleError, match=r"needs the module own_models_for_bundle.*install it where"):
        load_bundle(str(tmp_path / "a"), trusted=TRUSTED)


@pytest.mark.parametrize("name", ["weights.safetensors", "bundle.json"])
def test_every_altered_file_is_found(name, tmp_path):
    save_bundle(nn.Linear(3, 2), str(tmp_path / "a"), signature=SIGNATURE)
    path = tmp_path / "a" / name
    whole = path.read_bytes()
    for position in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises((IntegrityError, BundleError)):
            load_bundle(str(tmp_path / "a"))
    path.write_bytes(whole[:-1])
    with pytest.raises(IntegrityError):
        load_bundle(str(tmp_path / "a"))
    path.write_bytes(whole)
    load_bundle(str(tmp_path / "a"))
    with pytest.raises(IntegrityError, match="was expected"):
        load_bundle(str(tmp_path / "a"), expected_hash="0" * 64)


def test_nothing_is_overwritten_and_nothing_is_half_there(tmp_path):
    save_bundle(nn.Linear(3, 2), str(tmp_path / "a"))
    before = read_bundle(str(tmp_path / "a")).content_hash
    with pytest.raises(ConflictError):
        save_bundle(nn.Linear(3, 2), str(tmp_path / "a"))
    assert read_bundle(str(tmp_path / "a")).content_hash == before
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "other").write_text("mine")
    with pytest.raises(ConflictError):
        save_bundle(nn.Linear(3, 2), str(tmp_path / "b"))
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    with pytest.raises(BundleError, match="holds no bundle"):
        read_bundle(str(tmp_path / "b"))


def test_a_bundle_loads_in_a_fresh_process(tmp_path):
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    save_bundle(model, str(tmp_path / "a"), preprocessing={"mean": [1.5]})
    code = (
        "import sys, torch; from sparkdl.models.bundle import load_bundle\n"
        "b = load_bundle(sys.argv[1]); print(b.model(torch.ones(1, 4)).tolist(), b.info.preprocessing['mean'])\n"
        "assert 'pyspark' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == f"{model(torch.ones(1, 4)).tolist()} [1.5]"


def test_a_bundle_lies_on_a_remote_store_too(tmp_path):
    import fsspec

    model = nn.Linear(4, 2)
    info = save_bundle(model, "memory://models/m", signature=SIGNATURE)
    assert "bundle.json" in str(fsspec.filesystem("memory").ls("/models/m", detail=False))
    for _ in range(2):  # the second time from the local copy
        bundle = load_bundle("memory://models/m", expected_hash=info.content_hash)
        assert torch.equal(bundle.model.weight, model.weight)


def test_loaded_weights_can_be_trained_without_touching_the_file(tmp_path):
    save_bundle(nn.Linear(4, 2), str(tmp_path / "a"))
    model = load_bundle(str(tmp_path / "a")).model
    before = (tmp_path / "a" / "weights.safetensors").read_bytes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert (tmp_path / "a" / "weights.safetensors").read_bytes() == before
    load_bundle(str(tmp_path / "a"))


def test_an_output_of_varying_length_is_refused():
    """Its width would be that of the longest row of a batch."""
    with pytest.raises(ConfigError, match=r"outputs \['y'\] are of varying length"):
        Signature(inputs=SIGNATURE.inputs, outputs=(TensorField(name="y", shape=(None,)),))
