"""The parameters of the estimator and its model, under the names of Horovod, of Spark ML, or ours.

What a user passes enters; checked values leave, or a ``ConfigError`` that says what to write instead. Start at
``spec.py``, one table that the code, the help texts and ``PARAMETERS.md`` are made from; ``params.py`` makes Spark
``Param`` objects of it, ``converters.py`` checks values, ``backend.py`` has its backends.
"""
