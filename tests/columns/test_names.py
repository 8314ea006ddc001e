"""Names of columns with dots, backticks and other cases."""

import pytest

from sparkdl.columns.names import check_listed, check_names, quoted
from sparkdl.errors import ConfigError, SchemaError


@pytest.mark.parametrize(("name", "whole"), [("a", "`a`"), ("a.b", "`a.b`"), ("a`b", "`a``b`")])
def test_a_name_is_quoted_whole(name, whole):
    assert quoted(name) == whole


def test_a_name_that_stands_for_several_columns_is_refused_where_it_is_used():
    check_names(["a", "b", "B"], ["a"])
    with pytest.raises(SchemaError, match=r"2 columns of the name 'b', \['b', 'B'\], which Spark does not tell apart"):
        check_names(["a", "b", "B"], ["a", "b"])
    check_names(["a", "b", "B"], ["a", "b"], cases=True)
    with pytest.raises(SchemaError, match="2 columns of the name 'b'"):
        check_names(["b", "b"], ["b"], cases=True)


def test_one_text_is_no_list_of_names():
    check_listed("labels", ["id"])
    check_listed("labels", ())
    with pytest.raises(ConfigError, match=r"^labels='id' is one string: give a list of names, as in \['id'\]$"):
        check_listed("labels", "id")
