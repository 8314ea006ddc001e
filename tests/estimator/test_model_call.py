import cloudpickle
import pytest
import torch

from sparkdl.estimator.model_call import ModelCall, ModelInput, attach_call, detach_call

BATCH = {"features": torch.arange(6.0).reshape(3, 2), "id": torch.tensor([1, 0, 1])}
COLUMNS = (
    ModelInput("a", "features", index=0, shape=(-1, 1)),
    ModelInput("b", "features", index=1),
    ModelInput("id", "id", dtype="float32"),
)


def test_columns_of_a_packed_tensor_are_views_without_a_copy():
    (a, b, identity), named = ModelCall(COLUMNS).arguments(BATCH)
    assert named == {}
    assert a.shape == (3, 1)
    assert b.shape == (3,)
    assert a.data_ptr() == BATCH["features"].data_ptr()
    assert b.untyped_storage().data_ptr() == BATCH["features"].untyped_storage().data_ptr()
    assert identity.dtype == torch.float32


class Takes(torch.nn.Module):
    def __init__(self, style):
        super().__init__()
        self.style = style

    def forward(self, *args, **kwargs):
        if self.style == "dict":
            return args[0]["a"]
        return kwargs["a"] if self.style == "keywords" else args[0]


@pytest.mark.parametrize("style", ["positional", "keywords", "dict"])
def test_a_model_with_attached_views_takes_a_batchs_tensors_and_travels_so(style):
    model, call = Takes(style), ModelCall(COLUMNS, style)
    attach_call(model, call)
    model = cloudpickle.loads(cloudpickle.dumps(model))
    assert call.tensors == ("features", "id")
    assert torch.equal(model(BATCH["features"], BATCH["id"]), BATCH["features"][:, :1])
    detach_call(model)
    assert not model._forward_pre_hooks


def test_plain_views_attach_nothing():
    plain = ModelCall((ModelInput("features", "features"),))
    model = torch.nn.Linear(2, 1)
    attach_call(model, plain)
    assert not model._forward_pre_hooks
