"""Documents become typed values, or one error that names file and field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from sparkdl.documents.typed import Count, Source, convert, decode, encode, parse, read
from sparkdl.errors import IntegrityError
from sparkdl.storage import Storage

SOURCE = Source("plan.json", "write it again")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    name: str
    rows: Count = 0

    def __post_init__(self):
        if not self.name:
            raise ValueError("a part has no name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    parts: tuple[Part, ...]
    best: Part | None = None
    by_name: Mapping[str, Part] = field(default_factory=dict)
    loss: float = 0.0


PLAN = Plan(parts=(Part(name="a", rows=3), Part(name="b")), best=Part(name="c"), by_name={"x": Part(name="d")})


def test_a_key_that_is_no_string_is_refused_by_name():
    """Trees of tensors have such keys, where a document holds a tree."""
    for key in (7, 2.5, None, (1, "a"), 10**80):
        with pytest.raises(IntegrityError, match=r"the field .* is unknown"):
            convert({"parts": [], key: 1}, Plan, SOURCE)


def test_what_was_encoded_comes_back_equal():
    assert decode(encode(PLAN), Plan, SOURCE) == PLAN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "it is no JSON"),
        (b'{"parts":[]', "it is no JSON"),
        (b"\xff{}", "it is no UTF-8"),
        (b"[]", r"in \$, Expected `object`, got `array`"),
        (b"{}", r"in \$, Object missing required field `parts`"),
        (b'{"parts":[{"name":"a","rows":"3"}]}', r"in \$.parts\[0\].rows, Expected `int`, got `str`"),
        (b'{"parts":[{"name":"a","rows":true}]}', r"parts\[0\].rows, Expected `int`, got `bool`"),
        (b'{"parts":[{"name":"a","rows":-1}]}', r"parts\[0\].rows, Expected `int` >= 0"),
        (b'{"parts":[{"name":"a","rows":%d}]}' % 2**80, r"parts\[0\].rows, Expected `int` <="),
        (b'{"parts":[{"name":"a","rows":1%s}]}' % (b"0" * 5000), "it is no JSON"),
        (b'{"parts":[{"name":""}]}', r"in \$.parts\[0\], a part has no name"),
        (b'{"parts":[],"color":1}', r"in \$, the field 'color' is unknown"),
        (b'{"parts":[{"name":"a","color":1}]}', r"in \$.parts\[0\], the field 'color' is unknown"),
        (b'{"parts":[],"best":{"name":"a","color":1}}', r"in \$.best, the field 'color' is unknown"),
        (b'{"parts":[],"by_name":{"k":{"name":"a","color":1}}}', r"by_name\[...\], the field 'color' is unknown"),
        (b'{"parts":[],"parts":[]}', "the key 'parts' stands there twice"),
        (b'{"parts":[],"loss":NaN}', "NaN is no number"),
        (b'{"parts":[],"loss":-Infinity}', "-Infinity is no number"),
        (b'{"parts":[],"loss":1e999}', "the number '1e999' is out of range"),
        (b"[" * 101 + b"]" * 101, "nested deeper than 100"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper than 100"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "nested deeper than 100"),
    ],
)
def test_whatever_is_wrong_is_one_sentence_with_file_and_field(text, message):
    with pytest.raises(IntegrityError, match=f"^plan.json cannot be read: .*{message}.*: write it again$"):
        decode(text, Plan, SOURCE)


def test_a_hundred_levels_are_read():
    assert parse(b"[" * 100 + b"]" * 100, SOURCE)


def test_a_document_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "plan.json"
    with file.open("wb") as sink:
        sink.truncate(1 << 40)
    with pytest.raises(IntegrityError, match="has 1099511627776 bytes, at most 1000 are expected"):
        read(Storage.of(file), Plan, "again", limit=1000)


@pytest.mark.parametrize("value", ["[]", "{}", '{"a":1}', '"ab"', "1.5"])
def test_many_small_values_are_refused_before_they_take_several_times_the_memory_of_their_text(value):
    limit = 1 << 20
    dense = f"[{','.join([value] * (limit // (len(value) + 2)))}]".encode()
    with pytest.raises(IntegrityError, match=r"values would take \d+ MiB of memory, .* at most 4"):
        parse(dense, Source("a document"), limit)
    words = [f"word {number:06}" for number in range(limit // 20)]
    assert parse(encode(words), Source("a document"), limit) == words


def test_not_a_number_stands_only_where_a_reader_expects_it():
    text = encode({"parts": [], "loss": float("nan")}, nan=True)
    found = convert(parse(text, SOURCE, nan=True), Plan, SOURCE)
    assert found.loss != found.loss
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode(found)


def test_a_part_of_a_document_is_named_by_its_whole_path():
    with pytest.raises(IntegrityError, match=r"in \$.plans\[3\].parts, "):
        convert({"parts": 1}, Plan, SOURCE, "$.plans[3]")


@pytest.mark.timeout(120)
def test_a_key_that_stands_there_twice_is_found_among_very_many():
    names = [f"{n:x}" for n in range(200_000)]
    text = "{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}"
    with pytest.raises(IntegrityError, match="'30d3f' stands there twice"):
        parse(text.encode(), SOURCE)
