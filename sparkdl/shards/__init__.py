"""Stage 1 of 6: a DataFrame (or an Arrow table) in, Arrow shards and their manifest out.

Enters: rows, a ``Layout`` that says how columns become tensors, a ``ShardConfig``. Leaves: files below ``shards/``, and
``manifest.json``, committed last: a set exists only if its manifest names it. Start at ``write.py`` for Spark, at
``files.py`` for what is in a file, and at ``manifest.py`` for what readers are told.
"""
