"""A collective in every rank of the test run's pool."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial

import cloudpickle
import pytest
from rank_pool import services

from sparkdl import config
from sparkdl.collective import open_collective

BACKENDS = tuple(name for name in config.BACKENDS if name != "auto")


def in_collective(job, backend, timeout, world):
    """Open a collective, hand it to ``job``, close it."""
    collective = open_collective(world, backend=backend, timeout=timedelta(seconds=timeout))
    failed = True
    try:
        value = job(collective)
        failed = False
        return value
    finally:
        collective.close(failed=failed)


@pytest.fixture
def run_collective(ranks):
    """``run_collective(job, size, backend)``: the values of ``job(collective)`` in rank order; errors raise."""

    def run(job, size, backend, *, timeout=20.0, raw=False, environment=None):
        cloudpickle.register_pickle_by_value(sys.modules[getattr(job, "func", job).__module__])
        job = partial(in_collective, job, backend, timeout)
        values = ranks.run_at_store(services(backend), job, size, environment)
        if not raw:
            for value in values:
                if isinstance(value, BaseException):
                    raise value
        return values

    return run
