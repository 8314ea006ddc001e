"""The store of a run as torch's own classes use it, several keys at once too."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from run_store import held_store

from sparkdl.collective.rendezvous.torch_store import RunStore


def test_torch_reads_and_writes_the_store_of_the_run():
    with held_store() as client:
        store = RunStore(client)
        store.set_timeout(timedelta(seconds=0.2))
        scope = dist.PrefixStore("here", store)
        scope.multi_set(["x", "y"], ["1", "2"])
        assert client.get("here/x", 1) == b"1"
        assert scope.multi_get(["x", "y"]) == store.multi_get(["here/x", "here/y"]) == [b"1", b"2"]
        scope.append("x", "3")
        assert (scope.get("x"), scope.add("n", 2), scope.num_keys()) == (b"13", 2, 3)
        assert scope.compare_set("x", "13", "z") == b"z"
        assert (scope.check(["x"]), scope.delete_key("x"), scope.check(["x"])) == (True, True, False)
        with pytest.raises(dist.DistStoreError, match="nobody has set"):
            scope.wait(["never"], timedelta(seconds=0.05))
        with pytest.raises(dist.DistStoreError, match="nobody has set"):
            scope.get("never")
