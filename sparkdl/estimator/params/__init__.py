"""The parameters of the estimator and its model.

Enters: what a user passes, by the names of Horovod, of Spark ML, or ours. Leaves: checked values, or a ``ConfigError``
that says what to write instead. Start at ``spec.py``, one table that the code, the help texts and ``PARAMETERS.md`` are
made from; ``params.py`` makes Spark ``Param`` objects of it, ``converters.py`` checks values, ``renamed.py`` knows what
other libraries call a parameter, ``backend.py`` has its backends.
"""
