"""Simulations of schedules: buckets that leave during a backward pass, stages of a pipeline, uneven ranks.

They know seconds alone; ``planner.py`` says of what.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean

_DRAWS = 400


def backward_with_buckets(
    ready: Sequence[float],
    transfers: Sequence[float],
    backward: float,
    *,
    slowed: float = 0.0,
    stretched: float = 1.0,
) -> float:
    """Seconds of a backward pass whose buckets of gradients are sent while it goes on, one behind the other.

    Args:
        ready: by bucket, the seconds of computing behind which it is full; rising.
        transfers: by bucket, the seconds that the link takes for it.
        backward: seconds of computing.
        slowed: the share of its speed that computing loses while the link is busy: messages take processors, too.
        stretched: how many times as long a transfer takes while there is computing beside it, for the same reason.
    """
    clock = computed = 0.0
    for full, transfer in zip(ready, transfers, strict=True):
        alone = max(full - computed, 0.0)
        computed += alone
        beside = min(transfer * stretched, (backward - computed) / (1 - slowed))
        computed += beside * (1 - slowed)
        clock += alone + beside + (transfer - beside / stretched)
    return clock + (backward - computed)


def one_forward_one_backward(
    forward: Sequence[float],
    backward: Sequence[float],
    transfers: Sequence[float],
    latency: float,
    micro_batches: int,
) -> float:
    """Seconds of a batch that goes through the stages of a pipeline as 1F1B has it (Narayanan et al., SOSP 2019).

    While forwards and backwards take turns, a stage goes on once its own message has left, since torch's schedule waits
    for what it sends and what it gets together.

    Args:
        forward: by stage, seconds of a micro-batch.
        backward: the same.
        transfers: by cut, seconds for which a message fills the link, each way.
        latency: seconds behind that until it has arrived.
        micro_batches: of the batch.
    """
    stages = len(forward)
    orders: list[list[tuple[bool, int]]] = []  # by stage: whether forward, and of which micro-batch
    for stage in range(stages):
        first = min(stages - stage, micro_batches)
        order = [(True, number) for number in range(first)]
        for number in range(micro_batches):
            order.append((False, number))
            if first + number < micro_batches:
                order.append((True, first + number))
        orders.append(order)
    arrived = {(0, True, number): 0.0 for number in range(micro_batches)}
    arrived |= {(stages - 1, False, number): 0.0 for number in range(micro_batches)}
    clocks, links_free = [0.0] * stages, {(cut, way): 0.0 for cut in range(stages - 1) for way in (True, False)}
    position = [0] * stages
    while any(position[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                is_forward, number = orders[stage][position[stage]]
                if (stage, is_forward, number) not in arrived:
                    break
                position[stage] += 1
                begin = max(clocks[stage], arrived[stage, is_forward, number])
                clocks[stage] = begin + (forward if is_forward else backward)[stage]
                target, cut = (stage + 1, stage) if is_forward else (stage - 1, stage - 1)
                if 0 <= target < stages:
                    sent = max(clocks[stage], links_free[cut, is_forward]) + transfers[cut]
                    links_free[cut, is_forward] = sent
                    arrived[target, is_forward, number] = sent + latency
                    ahead = min(stages - stage, micro_batches)  # forwards before its first backward
                    if number >= ahead - 1 if is_forward else number + ahead < micro_batches:
                        clocks[stage] = sent
    return max(clocks)


def mean_of_slowest(step: Callable[[float], float], ranks: int, jitter: float, *, straggler: float = 1.0) -> float:
    """Mean seconds of a step that lasts until the slowest of ``ranks`` has computed.

    Each rank's computing takes ``1 + jitter * z`` times as long as the median, with a ``z`` of its own in each step,
    drawn from a normal distribution; one rank takes ``straggler`` times as long besides.

    Args:
        step: seconds of a step, by how many times as long the slowest rank computes.
        ranks: how many.
        jitter: relative standard deviation of the seconds that one rank computes.
        straggler: 1 where there is none.
    """
    if ranks == 1 or not jitter:
        return step(straggler)
    generator = random.Random(0)
    normal = NormalDist(1.0, jitter).inv_cdf
    seconds = []
    for _ in range(_DRAWS):
        # The greatest of n uniform numbers is the n-th root of one, so that 4,096 ranks cost one draw.
        greatest = normal(generator.random() ** (1 / ranks))
        if straggler > 1:
            greatest = max(greatest, straggler * normal(generator.random()))
        seconds.append(step(max(greatest, 0.0)))
    return fmean(seconds)
