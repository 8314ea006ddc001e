"""torch's schedules begin to receive before they send, inside the block alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from sparkdl.compat.pipeline_messages import receives_first


@pytest.mark.parametrize(("device", "first"), [("cpu", dist.irecv), ("cuda", dist.isend)])
def test_what_is_received_begins_before_what_is_sent(monkeypatch, device, first):
    begun = []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: begun.append([o.op for o in operations]))
    operations = [SimpleNamespace(op=dist.isend), SimpleNamespace(op=dist.irecv)]
    with receives_first(torch.device(device)):
        schedules._batch_p2p(operations)
    schedules._batch_p2p(operations)  # if this fails, torch does it itself, and the module can go
    assert [order[0] for order in begun] == [first, dist.isend]
