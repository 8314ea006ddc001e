"""The networks that sparkdl brings: rows do not meet, bundles load them without a word, and nothing else of sparkdl."""

from __future__ import annotations

import copy
import json
import tracemalloc

import pytest
import torch

from sparkdl.errors import BundleError
from sparkdl.models import networks
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.models.folder import content_hash_of
from sparkdl.models.importing import build, resolve
from sparkdl.models.networks import TabularEnsemble, TabularNet
from sparkdl.nn import PoissonLoss

FEATURES = {
    "inputs": [
        {"name": "numbers", "shape": [3], "knots": [[-1.0, 0.0, 0.5, 2.0], [], [0.0, 1.0]]},
        {"name": "categories", "shape": [2], "cardinalities": [5, 400]},
        {"name": "basket", "shape": [], "cardinalities": [50]},
        {"name": "photo", "shape": [1, 8, 8]},
    ],
    "labels": [
        {"name": "fare", "type": "regression", "outputs": 1, "mean": 12.0, "deviation": 3.0, "loss": "mse"},
        {"name": "kind", "type": "multiclass", "outputs": 4, "mean": 0.0, "deviation": 1.0, "loss": "log_loss"},
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


@pytest.fixture(params=[TabularEnsemble, TabularNet])
def net(request):
    torch.manual_seed(0)
    return request.param(FEATURES).eval()


def test_it_answers_for_every_label(net):
    fare, kind = net(rows(7))
    assert (fare.shape, kind.shape) == ((7, 1), (7, 4))
    one = type(net)({**FEATURES, "labels": FEATURES["labels"][:1]}).eval()
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


def test_the_members_of_an_ensemble_are_trained_each_on_its_own_loss():
    labels = [
        {**FEATURES["labels"][0], "weight": 2.0},
        {"name": "late", "type": "binary", "outputs": 1, "mean": 0.0, "deviation": 1.0, "loss": "log_loss"},
        FEATURES["labels"][1],
        {"name": "paid", "type": "regression", "outputs": 1, "mean": 0.0, "deviation": 1.0, "loss": "poisson"},
    ]
    torch.manual_seed(0)
    net = TabularEnsemble({**FEATURES, "labels": labels}, dropout=0.0)
    answers: list[torch.Tensor] = []
    net.layers.register_forward_hook(lambda _, __, hidden: answers.append(hidden))
    fares, late, kinds = torch.randn(7, 1) + 12, torch.randint(0, 2, (7, 1)).float(), torch.randint(0, 4, (7,))

    paid = torch.rand(7, 1) * 50

    def loss(fare, is_late, kind, amount):
        of_amount = PoissonLoss(mean=20.0)(amount, paid)
        of_late = torch.nn.functional.binary_cross_entropy_with_logits(is_late, late)
        return 2 * (fare - fares).square().mean() + of_late + torch.nn.functional.cross_entropy(kind, kinds) + of_amount

    of_mean = loss(*net(rows(7)))
    leaving = torch.einsum("mrw,mow->mro", answers[0], net.leave) + net.leave_bias.unsqueeze(1)
    members = [loss(*member.split(net.outputs, dim=1)) for member in leaving * net.deviation + net.mean]
    torch.testing.assert_close(of_mean + net.auxiliary_loss, torch.stack(members).mean())
    assert net.auxiliary_loss > 0.001
    assert copy.deepcopy(net).auxiliary_loss is None
    net.auxiliary_loss = None
    net.eval()(rows(7))
    assert net.auxiliary_loss is None


def test_of_other_losses_the_mean_of_the_members_is_trained():
    label = {**FEATURES["labels"][0], "loss": "mae"}
    net = TabularEnsemble({**FEATURES, "labels": [label]})
    net(rows(7))
    assert net.auxiliary_loss is None


def test_a_category_that_training_never_saw_has_zeros_for_a_vector_until_it_is_seen(net):
    optimizer = torch.optim.AdamW(net.train().parameters(), lr=1e-2)
    batch = rows(64)
    batch["categories"].clamp_(min=1)
    (_, vectors) = net.parts[1].tables
    for first_id, is_known in ((1, False), (0, True)):
        batch["categories"][0, 1] = first_id
        for _ in range(3):
            optimizer.zero_grad()
            net(batch)[0].sum().backward()
            optimizer.step()
        assert vectors.weight[0].any() == is_known


def test_the_excess_of_amounts_is_finite_wherever_the_loss_is():
    label = {"name": "paid", "type": "regression", "outputs": 1, "mean": 100.0, "deviation": 1.0, "loss": "poisson"}
    net = TabularEnsemble({**FEATURES, "labels": [label]})
    loss = PoissonLoss()(net(rows(7)), torch.ones(7)) + net.auxiliary_loss
    assert torch.isfinite(loss)


def test_numbers_bend_at_their_knots_and_count_less_and_less_beyond_them_for_half_their_span():
    torch.manual_seed(0)
    features = {"inputs": [FEATURES["inputs"][0]], "labels": FEATURES["labels"][:1]}
    (part,) = TabularEnsemble(features).parts
    torch.nn.init.normal_(part.lines)
    numbers = torch.zeros(6, 3)
    numbers[:, 0] = torch.tensor([-0.9, -0.5, -0.1, 3.3, 3.4, 3.5])
    shares = ((numbers.T.unsqueeze(1) - part.starts) * part.slopes).clamp(0, 1)  # (columns, intervals, rows)
    torch.testing.assert_close(shares[0, 0, :3], torch.tensor([0.1, 0.5, 0.9]))
    assert shares[0, :, 3:].eq(1).all()
    assert not shares[1:].any()  # without knots, and between two ends, a number is a line as it is
    bent = part(numbers, None)
    assert bent.shape == (6, 27)
    distance = numbers[:, 0] - 0.5  # from the median; its deviation is below 1, and 1 is what is taken then
    torch.testing.assert_close(bent[:, 0], 0.5 + distance / (1 + distance**2 / 36).sqrt())
    torch.testing.assert_close(bent[:, 1:3], numbers[:, 1:])  # of fewer than four knots a number is as it is
    far = torch.tensor([[3.5, 1e6, 1.5], [50.0, 1e6, 80.0]])
    torch.testing.assert_close(part(far, None)[1], part(far, None)[0])


@pytest.mark.parametrize("arguments", [{"members": 1}, {"bends": 0}, {"width": 16, "depth": 1}, {"embedding": 3}])
def test_each_argument_of_an_ensemble_changes_its_size(arguments):
    count = sum(parameter.numel() for parameter in TabularEnsemble(FEATURES).parameters())
    assert sum(parameter.numel() for parameter in TabularEnsemble(FEATURES, **arguments).parameters()) != count


@pytest.mark.parametrize(("numbers", "bends"), [(64, 8), (65, 7), (256, 2), (257, 0)])
def test_many_numbers_have_fewer_bends_and_are_held_back_in_any_case(numbers, bends):
    knots = [[0.0, 1.0, 2.0]] * numbers
    (part,) = TabularEnsemble({**FEATURES, "inputs": [{"name": "numbers", "shape": [numbers], "knots": knots}]}).parts
    assert part.width == numbers * (1 + bends)
    far, near = (torch.full((1, numbers), value) for value in (1e9, 3.0))
    torch.testing.assert_close(part(far, None), part(near, None), rtol=0, atol=0)


def test_a_number_counts_for_no_more_than_six_deviations_of_its_column_whatever_its_unit():
    knots = [unit * torch.linspace(-2, 2, 33) + 7 * unit for unit in (1.0, 1000.0)]
    knots = [[*(ends[:-1].tolist()), 100 * unit] for ends, unit in zip(knots, (1.0, 1000.0), strict=True)]
    features = {**FEATURES, "inputs": [{"name": "numbers", "shape": [2], "knots": knots}]}
    (part,) = TabularEnsemble(features, bends=0).parts
    small, large = part(torch.tensor([[7.0, 7e3], [8.0, 8e3], [100.0, 1e5]]), None).T
    assert small[0] == 7
    assert 7.9 < small[1] < 8
    assert 12.9 < small[2] < 13
    torch.testing.assert_close(large / 1000, small, rtol=0.03, atol=0)


@pytest.mark.parametrize("numbers", [256, 3000])
def test_a_bundle_of_a_wide_ensemble_loads_within_the_bounds_of_its_few_tensors(numbers, tmp_path):
    knots = [[value / 7 for value in range(33)]] * numbers
    features = {**FEATURES, "inputs": [{"name": "numbers", "shape": [numbers], "knots": knots}]}
    net = TabularEnsemble(features).eval()
    save_bundle(net, str(tmp_path / "bundle"))
    row = {"numbers": torch.rand(2, numbers) * 5}
    again = load_bundle(str(tmp_path / "bundle")).model(row)
    torch.testing.assert_close(torch.cat(again, 1), torch.cat(net(row), 1), rtol=0, atol=0)


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


@pytest.mark.parametrize("arguments", [{"members": 0}, {"depth": 0}])
def test_an_ensemble_of_nothing_is_refused(arguments):
    with pytest.raises(ValueError, match="1 or more"):
        TabularEnsemble(FEATURES, **arguments)


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
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match=message):
            load_bundle(str(tmp_path / "b"))
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


def test_a_short_document_cannot_name_room_for_very_many_knots():
    """Each column has room for as many intervals as the one with most."""
    numbers = {"name": "n", "shape": [20_001], "knots": [list(range(40_000)), *([[]] * 20_000)]}
    with pytest.raises(ValueError, match="20001 columns, of which one has 39999 intervals, are more than 4,000,000"):
        TabularEnsemble({**FEATURES, "inputs": [numbers]})
