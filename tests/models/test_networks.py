"""The networks that sparkdl brings: rows do not meet, bundles load them without a word, and nothing else of sparkdl."""

from __future__ import annotations

import json

import pytest
import torch

from sparkdl.errors import BundleError
from sparkdl.models import networks
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.models.folder import content_hash_of
from sparkdl.models.importing import build, resolve
from sparkdl.models.networks import TabularNet

FEATURES = {
    "inputs": [
        {"name": "numbers", "shape": [3]},
        {"name": "categories", "shape": [2], "cardinalities": [5, 400]},
        {"name": "basket", "shape": [], "cardinalities": [50]},
        {"name": "photo", "shape": [1, 8, 8]},
    ],
    "labels": [
        {"name": "fare", "outputs": 1, "mean": 12.0, "deviation": 3.0},
        {"name": "kind", "outputs": 4, "mean": 0.0, "deviation": 1.0},
    ],
}


def rows(count, seed=0):
    torch.manual_seed(seed)
    lengths = torch.randint(0, 6, (count,))
    lengths[0] = 0
    mask = torch.arange(6) < lengths.unsqueeze(1)
    return {
        "numbers": torch.randn(count, 3),
        "categories": torch.stack([torch.randint(0, 5, (count,)), torch.randint(0, 400, (count,))], 1),
        "basket": torch.randint(1, 50, (count, 6)) * mask,
        "basket_mask": mask,
        "photo": torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8),
    }


@pytest.fixture
def net():
    torch.manual_seed(0)
    return TabularNet(FEATURES).eval()


def test_it_answers_for_every_label(net):
    fare, kind = net(rows(7))
    assert (fare.shape, kind.shape) == ((7, 1), (7, 4))
    one = TabularNet({**FEATURES, "labels": FEATURES["labels"][:1]}).eval()
    assert one(rows(7)).shape == (7, 1)
    assert one(rows(500)).mean().item() == pytest.approx(12.0, abs=3.0)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_it_says_of_a_row_does_not_depend_on_the_rows_beside_it(net, count):
    whole = torch.cat(net(rows(12)), 1)
    parts = [{name: value[start : start + count] for name, value in rows(12).items()} for start in range(0, 12, count)]
    torch.testing.assert_close(torch.cat([torch.cat(net(part), 1) for part in parts]), whole, rtol=1e-5, atol=1e-5)


def test_padding_says_nothing(net):
    batch = rows(6)
    wider = {**batch, "basket": torch.nn.functional.pad(batch["basket"], (0, 3), value=7)}
    wider["basket_mask"] = torch.nn.functional.pad(batch["basket_mask"], (0, 3))
    torch.testing.assert_close(torch.cat(net(wider), 1), torch.cat(net(batch), 1))


def test_it_learns(net):
    net.train()
    batch, wanted = rows(64), torch.randn(64, 1) + 12
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.mse_loss(net(batch)[0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_a_bundle_of_it_loads_without_a_word(net, tmp_path):
    save_bundle(net, str(tmp_path / "bundle"))
    document = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    assert document["model"]["kind"] != "pickle"
    again = load_bundle(str(tmp_path / "bundle")).model
    torch.testing.assert_close(torch.cat(again(rows(5)), 1), torch.cat(net(rows(5)), 1), rtol=0, atol=0)


@pytest.mark.parametrize(
    "path",
    [
        "sparkdl.models.networks:torch",
        "sparkdl.models.networks:nn.Linear",
        "sparkdl.models.networks:_part",
        "sparkdl.models.importing:build",
        "sparkdl.models.networks_:TabularNet",
        "sparkdl.models.networks.deeper:TabularNet",
        "sparkdl.models:networks",
    ],
)
def test_nothing_else_of_sparkdl_is_made(path):
    with pytest.raises(BundleError):
        build(path, {})


def test_the_module_holds_networks_and_helpers_alone():
    for name, value in vars(networks).items():
        if getattr(value, "__module__", "") == networks.__name__ and not name.startswith("_"):
            assert issubclass(value, torch.nn.Module)
    assert resolve("sparkdl.models.networks:TabularNet", ("sparkdl.models.networks",)) is TabularNet


def forged(folder, **arguments):
    """Let a bundle ask for other arguments than its weights are of, with a hash that fits."""
    document = json.loads((folder / "bundle.json").read_text())
    document["model"]["arguments"] |= arguments
    document["content_hash"] = content_hash_of(document)
    (folder / "bundle.json").write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 10**9}, "far more layers"),
        ({"depth": 5}, "the saved weights"),
        ({"width": 2**24}, "the saved weights"),
        ({"width": 2**61}, "fails with the arguments"),
        ({"embedding": 2**40}, "the saved weights"),
        (
            {"features": {**FEATURES, "inputs": [{"name": "n", "shape": [1], "cardinalities": [10**12]}]}},
            "the saved weights",
        ),
        (
            {"features": {**FEATURES, "inputs": [{"name": "n", "shape": [1], "cardinalities": [1] * 10**5}]}},
            "far more layers",
        ),
        ({"features": {**FEATURES, "inputs": [{"name": "n", "shape": [1, 1, 1]}] * 6000}}, "far more layers"),
        (
            {"features": {**FEATURES, "labels": [{"name": "y", "outputs": 10**12, "mean": 0.0, "deviation": 1.0}]}},
            "the saved weights",
        ),
    ],
)
def test_a_bundle_takes_no_memory_before_its_weights_are_known_to_be_the_networks(net, tmp_path, arguments, message):
    save_bundle(net, str(tmp_path / "b"))
    forged(tmp_path / "b", **arguments)
    with pytest.raises(BundleError, match=message):
        load_bundle(str(tmp_path / "b"))
