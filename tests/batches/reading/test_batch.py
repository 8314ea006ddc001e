"""One rank's part of a global batch."""

from __future__ import annotations

import pytest
import torch

from sparkdl.batches.reading.batch import Batch


def test_a_tensor_that_is_not_there_is_named_beside_those_that_are():
    batch = Batch({"x": torch.zeros(2), "y": torch.zeros(2)})
    with pytest.raises(KeyError, match=r"a batch has no tensor 'z': it has 'x', 'y'"):
        batch["z"]
    assert batch.get("z") is None
