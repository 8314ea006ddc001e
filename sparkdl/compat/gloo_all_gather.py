"""DTensor's all-gather on CPUs, replaced by another of gloo's, since a rank dies of torch's choice at times."""

from __future__ import annotations

import functools

import torch


@functools.cache
def replace_all_gather() -> torch.library.Library:
    """Let functional all-gathers of tensors on CPUs be those of ``out=``, in this process; idempotent.

    Both threads of a gloo group note the name of the operation that they have ended, without a lock. A name of more
    than 15 letters lies in memory of its own, which two threads that end at once free twice (torch 2.13,
    ``ProcessGroupGloo::runLoop``): a rank aborts with "double free or corruption", now or later. The functional
    all-gather, ``ALLGATHER_COALESCED``, is the only such name here; the one behind ``out=`` gives the same and has a
    short name. Of ten runs of the test suite three lost a rank. A gather of two ranks takes some 40 us longer, of 0.3
    ms. It can go when torch takes the lock, or another operation: ``tests/compat/test_gloo_all_gather_integration.py``
    notices that.

    Returns:
        What holds the replacement for as long as it lives, which is as long as the process.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("all_gather_into_tensor", _all_gather, "CPU")  # type: ignore[no-untyped-call]
    return library


def _all_gather(part: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    if part.is_complex():
        return torch.view_as_complex(_all_gather(torch.view_as_real(part), group_size, group_name))
    output = part.new_empty((group_size * part.shape[0], *part.shape[1:]))
    torch.ops._c10d_functional.all_gather_into_tensor_out.default(part, group_size, group_name, out=output)
    return output  # whose memory the operation under way is known by
