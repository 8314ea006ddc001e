"""What is made of a network's outputs travels with its bundle, and is all that anybody gets."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from sparkdl.errors import IntegrityError
from sparkdl.models.adjusted import AdjustedModel, adjusted
from sparkdl.models.bundle import load_bundle, save_bundle
from sparkdl.models.folder import Adjustment


class Two(nn.Module):
    """One output of quantiles, one of logits."""

    def __init__(self, form: str = "tuple") -> None:
        super().__init__()
        self.form, self.layer = form, nn.Linear(4, 5)

    def forward(self, x):
        quantiles, logits = self.layer(x)[:, :3], self.layer(x)[:, 3:]
        return {"late": quantiles, "kind": logits} if self.form == "dict" else (quantiles, logits)


ADJUSTMENTS = (Adjustment(output="late", ascending=True), Adjustment(output="kind", temperature=2.5))


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_quantiles_are_sorted_and_logits_divided_also_after_two_round_trips(form, tmp_path):
    model, x = Two(form), torch.randn(50, 4)
    quantiles, logits = model(x).values() if form == "dict" else model(x)
    assert (quantiles.diff(dim=1) < 0).any()  # or nothing was to be sorted
    made = {"factory": Two, "arguments": {"form": form}, "example": x}
    save_bundle(adjusted(model, ADJUSTMENTS), tmp_path / "a", **made)
    loaded = load_bundle(tmp_path / "a", trusted=[Two.__module__.partition(".")[0]]).model
    save_bundle(loaded, tmp_path / "b", **made)
    again = load_bundle(tmp_path / "b", trusted=[Two.__module__.partition(".")[0]]).model
    for one in (loaded, again):
        answers = one(x).values() if form == "dict" else one(x)
        torch.testing.assert_close(tuple(answers), (quantiles.sort(dim=1).values, logits / 2.5))
    assert adjusted(again, ()).state_dict().keys() == model.state_dict().keys()  # weights keep their names


def test_a_model_of_one_output_and_one_that_is_left_as_it_is(tmp_path):
    model, x = nn.Linear(4, 3), torch.randn(20, 4)
    made = adjusted(model, [Adjustment(output="y", temperature=0.5)])
    torch.testing.assert_close(made(x), model(x) / 0.5)
    assert adjusted(model, [Adjustment(output="y")]) is model
    assert adjusted(made, [Adjustment(output="y")]) is model
    assert isinstance(adjusted(made, [Adjustment(output="y", ascending=True)]), AdjustedModel)
    save_bundle(model, tmp_path / "plain")
    assert "adjustments" not in json.loads((tmp_path / "plain" / "bundle.json").read_text())["model"]


@pytest.mark.parametrize("temperature", [0, -1, "hot"])
def test_a_temperature_that_none_can_be_is_no_bundle(temperature, tmp_path):
    save_bundle(adjusted(nn.Linear(4, 3), [Adjustment(output="y", temperature=2.0)]), tmp_path / "a")
    file = tmp_path / "a" / "bundle.json"
    document = json.loads(file.read_text())
    document["model"]["adjustments"][0]["temperature"] = temperature
    file.write_text(json.dumps(document))
    with pytest.raises(IntegrityError):
        load_bundle(tmp_path / "a")
