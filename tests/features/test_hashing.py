"""The hash of values: literal, so that no version and no platform may change it."""

from __future__ import annotations

import numpy as np

from sparkdl.features.hashing import hashes, to_buckets


def test_hashes_are_these_numbers_for_ever():
    found = hashes(["", "a", "Köln", "42", "x" * 100])
    assert found.dtype == np.uint64
    assert found.tolist() == [
        11002672306508523268,
        9864288744972464332,
        12925458568599735103,
        13701894785847562559,
        365730103971579591,
    ]


def test_ids_are_these_for_ever_and_leave_0_free():
    assert to_buckets(["", "a", "Köln", "42"], 1000).tolist() == [269, 333, 104, 560]
    assert set(to_buckets(map(str, range(1000)), 2).tolist()) == {1, 2}
    assert to_buckets([], 5).tolist() == []
