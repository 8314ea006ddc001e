"""The statistics of a window in memory, counted as those of its reference were."""

from __future__ import annotations

from sparkdl.features.statistics import Running


def counted_between(reference, options, rows, functions=None):
    """The statistics of a window, as they are gathered beside those of a reference."""
    found = {}
    for name, one in options.items():
        running = Running()
        column = rows.column(one.source(name)).combine_chunks()
        values = running.add(name, one, column, quantiles=reference[name].quantiles, functions=functions or {})
        found[name] = running.result(
            reference[name].quantiles, [(each, values[each]) for each in reference[name].values]
        )
    return found
