"""Stage 6 of 6: a model and a table in, predictions out.

Enters: a DataFrame, and a bundle or a module with its signature. Leaves: the DataFrame with one column an output, which
is computed once it is used. Start at ``score.py``, which checks and plans on the driver and starts one ``mapInArrow``
stage; ``worker.py`` runs in Spark's Python workers, which get the model from ``models.py``; ``temporary_files.py`` says
how long it lies where they read it.
"""
