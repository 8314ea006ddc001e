"""A fit on the driver.

Enters: an estimator's parameters and a DataFrame, a table version, or shard sets. Leaves: ``Trained``, the module with
its trained weights. Start at ``fit.py``: prepare (``data.py``), check (``checks.py``), launch (``attempts.py``;
``rank.py`` is what runs there), collect. ``settings.py`` reads the parameters, ``shipping.py`` packs the user's
objects, ``grid.py`` shares shards among fits.
"""
