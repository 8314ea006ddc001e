"""Layout of gradients in buckets."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.collective.gradients.buckets import Bucket, plan_buckets, separate


def parameter(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.randn(*shape).to(dtype))


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from([torch.float32, torch.float64])), max_size=20),
    st.integers(0, 20),
    st.integers(1, 4000),
)
def test_every_parameter_lies_in_one_bucket_of_its_dtype_and_no_bucket_is_too_large(kinds, late, cap):
    params = [parameter(count, dtype=dtype) for count, dtype in kinds]
    ready, unsure = params[:late], params[late:]
    buckets = plan_buckets(ready, unsure, cap_bytes=cap)
    assert sorted(id(p) for b in buckets for p in b.params) == sorted(id(p) for p in params)
    for bucket in buckets:
        assert len({p.dtype for p in bucket.params}) == 1
        assert sum(p.numel() * p.element_size() for p in bucket.params) <= cap or len(bucket.params) == 1
        assert not (set(bucket.params) & set(ready) and set(bucket.params) & set(unsure))


def test_buckets_come_in_the_order_in_which_they_fill():
    wide, narrow = torch.float64, torch.float32
    params = [parameter(4, dtype=dtype) for dtype in (wide, narrow, narrow, wide)]
    assert [b.params for b in plan_buckets(params, [], cap_bytes=1000)] == [params[1:3], [params[0], params[3]]]


def test_gradients_become_views_that_share_the_strides_of_their_parameter():
    image = torch.nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    odd = parameter(3)
    bucket = Bucket([odd, image])
    odd.grad, image.grad = torch.ones(3), torch.randn(4, 3, 2, 2)
    kept = image.grad.clone()
    bucket.fill()
    assert image.grad.stride() == image.stride()
    assert torch.equal(image.grad, kept)
    assert image.grad.data_ptr() % 64 == bucket.flat.data_ptr() % 64
    bucket.publish()
    assert torch.equal(image.grad, kept)


def test_zeros_and_no_gradient_are_told_apart():
    zero, none = parameter(2), parameter(2)
    bucket = Bucket([zero, none])
    zero.grad = torch.zeros(2)
    bucket.fill()
    bucket.publish()
    assert zero.grad is not None
    assert none.grad is None


def test_gradients_that_overlap_are_separated_and_neighbours_stay_where_they_are():
    a, b, c, d, e = (parameter(4) for _ in range(5))
    whole = torch.arange(8.0)
    a.grad, b.grad, c.grad = whole[:4], whole[4:], whole[2:6]
    d.grad, e.grad = torch.ones(4), torch.sparse_coo_tensor([[1]], [2.0], (4,), check_invariants=True)
    separate([a, b, c, d, e])
    assert a.grad.data_ptr() == whole.data_ptr()
    for param in (b, c):
        param.grad.mul_(10)
    assert a.grad.tolist() == [0, 1, 2, 3]
    assert b.grad.tolist() == [40, 50, 60, 70]
    assert c.grad.tolist() == [20, 30, 40, 50]
    assert e.grad.to_dense().tolist() == [0, 2, 0, 0]
    places = [param.grad.data_ptr() for param in (a, b, d)]
    separate([a, b, d])
    assert [param.grad.data_ptr() for param in (a, b, d)] == places
