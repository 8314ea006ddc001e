"""Stage 6 of 6: a model and a table in, predictions out.

Enters: a DataFrame, and a bundle or a module with its signature. Leaves: the DataFrame with one column an output, which
is computed once it is used. Start at ``score.py``, which checks and plans on the driver and starts one ``mapInArrow``
stage. ``worker.py`` is what runs in Spark's Python workers: ``models.py`` has the model, ``inputs.py`` makes its
arguments of a batch, ``outputs.py`` makes columns of what it returns. ``temporary_files.py`` says how long a model lies
where workers read it.
"""
