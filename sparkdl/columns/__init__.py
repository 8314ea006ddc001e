"""Arrow columns to tensors, once, for shards and for scoring.

Enters: Arrow arrays as Spark hands them over. Leaves: numpy arrays whose memory a tensor can share, and statistics of
what went through. ``types.py`` is the table that says which column type becomes which tensor; ``decode.py`` reads a
column, ``cast.py`` gives it its dtype, for both sides. Start there.
"""
