"""What a worker notices of its weights, and a server of a worker that leaves."""

from __future__ import annotations

import threading

import pytest
import torch

from sparkdl.collective import open_collective
from sparkdl.errors import ConfigError, UnreachableError
from sparkdl.strategies.parameter_server import sum_of_bits
from sparkdl.strategies.served_collective import ServedCollective
from sparkdl.strategies.server import DirectLink, Held, Message, Server, Workers
from sparkdl.world import SOLO


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(1,), (3,), (7, 5), (300, 301)])
def test_other_values_have_another_sum_of_bits(dtype, shape):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    tensor = (numbers > 0) if dtype == torch.bool else numbers.to(dtype)
    before = sum_of_bits(tensor)
    assert sum_of_bits(tensor.clone()) == before
    changed = ~tensor if dtype == torch.bool else -tensor
    assert sum_of_bits(changed) != before
    changed = tensor.clone()
    changed.view(-1)[-1] = 1 - changed.view(-1)[-1].to(torch.complex64 if dtype.is_complex else torch.float32)
    assert sum_of_bits(changed) != before


def test_no_numbers_and_numbers_out_of_order_have_a_sum_of_bits():
    assert sum_of_bits(torch.empty(0, 3)) == 0
    numbers = torch.randn(6, 5)
    assert sum_of_bits(numbers.t()) == sum_of_bits(numbers.t().contiguous())
    assert sum_of_bits(torch.tensor(1.5)) != sum_of_bits(torch.tensor(-1.5))


def test_a_failed_rank_leaves_nobody_waiting_for_it_at_the_server_that_it_holds():
    weight = torch.nn.Parameter(torch.zeros(2))
    part = Held(parameter=weight, group=0, is_table=False)
    server = Server([part], torch.optim.SGD([weight], lr=0.1), Workers(2, tolerant=False), 0, seconds=60)
    raised = []

    def pull():
        try:
            server.perform(0, Message({"op": "pull", "clock": 1, "factor": 1.0}))
        except UnreachableError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=pull)
    waiting.start()
    DirectLink(server, 1).close(failed=True)
    waiting.join(30)
    assert raised == ["rank 1 is gone (it failed): the rank that failed first says why"]


def test_a_sum_by_servers_that_its_integers_do_not_hold_is_refused():
    ranks = ServedCollective(open_collective(SOLO, backend="solo"))
    ranks.serve(lambda payload: {0: payload, 1: payload})  # of two ranks that have the same
    assert ranks.all_reduce(torch.tensor([60], dtype=torch.int8)).tolist() == [120]
    with pytest.raises(ConfigError, match=r"lies in 140\.\.140, and torch.int8 holds -128\.\.127"):
        ranks.all_reduce(torch.tensor([70], dtype=torch.int8))
