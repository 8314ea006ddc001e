"""From the columns of a table to the arguments of a model.

Enters: a schema, the parts that columns play, and a model. Leaves: which columns are written as which tensors
(``column_plan.py``, start there), how a batch of them becomes the model's arguments (``views.py``), what the model
returns for two made-up rows (``probe.py``, with ``neighbours.py`` and ``row_lengths.py`` for what it finds out), and
the signature by which scoring feeds it. A fit and a model that was trained elsewhere share it.
"""
