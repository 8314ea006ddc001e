"""Rows of varying length in every form that a model may ask for, compared with plain Python lists."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdl.models.calling import Arguments, asked_forms, formed, value_form

ROWS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5)


def padded(rows):
    width = max(map(len, rows))
    values = torch.tensor([row + [0] * (width - len(row)) for row in rows]).reshape(len(rows), width)
    valid = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows]).reshape(len(rows), width)
    return values.long(), valid.bool()


@settings(deadline=None)
@given(ROWS)
def test_every_form_holds_the_same_rows(rows):
    values, valid = padded(rows)
    found = {form: formed(form, values, valid) for form in ("padded", "mask", "padding_mask", "lengths", "flat")}
    assert found["lengths"].tolist() == [len(row) for row in rows]
    assert [row[mask].tolist() for row, mask in zip(found["padded"], found["mask"], strict=True)] == rows
    assert torch.equal(found["mask"], ~found["padding_mask"])
    assert found["padded"].shape == found["mask"].shape
    assert found["padded"].shape[1] >= 1
    flat, starts = found["flat"].tolist(), formed("offsets", values, valid).tolist()
    assert [flat[at:to] for at, to in zip(starts, [*starts[1:], len(flat)], strict=True)] == rows
    jagged = formed("jagged", values, valid)
    assert jagged.layout == torch.jagged
    assert [row.tolist() for row in jagged.unbind()] == rows


def test_rows_without_padding_have_every_element():
    values = torch.tensor([[1, 2], [3, 4]])
    assert formed("mask", values, None).all()
    assert formed("lengths", values, None).tolist() == [2, 2]
    assert formed("", values, None) is values


def parameters(function):
    return list(inspect.signature(function).parameters.values())


def test_parameters_ask_by_the_columns_name_or_for_the_only_column():
    def several(tokens, tokens_mask, other_lengths, mask, **more):
        pass

    both = asked_forms(parameters(several), ["tokens", "other"])
    assert both == {"tokens": {"tokens_mask": "mask"}, "other": {"other_lengths": "lengths"}}
    alone = asked_forms(parameters(several), ["tokens"], sole="tokens")
    assert alone["tokens"] == {"tokens_mask": "mask", "mask": "mask"}
    assert asked_forms(parameters(several), ["tokens"], taken=["tokens_mask"]) == {}
    assert asked_forms(parameters(lambda t_ids_padding_mask: None), ["t.ids"]) == {
        "t.ids": {"t_ids_padding_mask": "padding_mask"}
    }
    assert asked_forms(parameters(torch.nn.EmbeddingBag(3, 2).forward), ["w"], sole="w") == {
        "w": {"offsets": "offsets"}
    }


@pytest.mark.parametrize(
    ("asked", "form"),
    [({"m": "mask"}, "padded"), ({"o": "offsets"}, "flat"), ({"j": "jagged", "l": "lengths"}, "jagged")],
)
def test_what_is_asked_for_beside_them_says_how_the_values_go(asked, form):
    assert value_form(asked) == form


def test_masks_go_by_keyword_where_values_go_by_position():
    values = {"a": 1, "mask": 2, "b": 3}
    found = Arguments.of("positional", values, ["mask"])
    assert (found.positional, found.named) == ((1, 3), {"mask": 2})
    assert Arguments.of("dict", values, ["mask"]).positional == (values,)
    assert Arguments.of("keywords", values, ["mask"]).named == values
