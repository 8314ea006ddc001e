"""Which failures another attempt may mend."""

from __future__ import annotations

import pytest

from sparkdl.errors import ConfigError, IntegrityError, PreflightError, RankFailedError, UnreachableError
from sparkdl.estimator.elastic import is_transient, run_elastic


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (UnreachableError("the driver was crowded"), True),
        (RankFailedError(1, "OSError: gone"), True),
        (RankFailedError(1, "TypeError: of the user's"), False),
        (PreflightError("too few slots"), False),
        (ConfigError("wrong"), False),
        (IntegrityError("damaged"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_pass_is_tried_again(error, again):
    assert is_transient(error) is again


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_proc": "2"}, "num_proc='2' is no number of ranks"),
        ({"num_proc": -2}, "num_proc=-2 is no number of ranks"),
        ({"max_num_proc": 0}, "max_num_proc=0 is no number of ranks"),
        ({"min_num_proc": 1, "min_np": 3}, "min_num_proc=1 and min_np=3 name one thing"),
        ({"reset_limit": "3"}, "reset_limit='3' is no number of attempts"),
        ({"reset_limit": True}, "reset_limit=True is no number of attempts"),
        ({"elastic_timeout": True}, "elastic_timeout=True is no number of seconds above 0"),
        ({"elastic_timeout": 0}, "elastic_timeout=0 is no number of seconds above 0"),
        ({"elastic_timeout": "soon"}, "elastic_timeout='soon' is no number of seconds above 0"),
        ({}, "HOROVOD_ELASTIC_TIMEOUT='ten' is no number of seconds above 0"),
    ],
)
def test_arguments_of_run_elastic_that_mean_nothing_are_refused_before_a_session_starts(settings, message, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "ten")
    with pytest.raises(ConfigError, match=message):
        run_elastic(lambda: 1, **settings)
