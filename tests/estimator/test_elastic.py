"""Which failures another attempt may mend."""

from __future__ import annotations

import pytest

from sparkdl.errors import ConfigError, IntegrityError, PreflightError, RankFailedError, UnreachableError
from sparkdl.estimator.elastic import is_transient


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
