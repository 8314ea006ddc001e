"""Stage 6 of 6: a model and a table in, predictions out.

Enters: a DataFrame or a table, and a bundle or a module with its signature. Leaves: the DataFrame with one column an
output, which is computed once it is used; or predictions in another table, at once. Start at ``score.py``, which checks
and plans on the driver (``transport.py``: which columns travel) and starts one ``mapInArrow`` stage; ``score_table.py``
does so with tasks that read and write a table's files themselves. ``worker.py`` is what runs in Spark's Python workers:
``models.py`` has the model, ``inputs.py`` makes its arguments of a batch, ``outputs.py`` makes columns of what it
returns. ``temporary_files.py`` says how long a model lies where workers read it.
"""
