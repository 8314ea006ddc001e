"""The launch of ranks: a callable in, its value on every rank out.

``driver/`` runs beside the Spark session and watches, ``rank/`` runs in the process of each rank, ``wire.py`` is what
they say to each other, ``store.py`` is where ranks meet, ``addresses.py`` at which address; ``local.py`` starts ranks
as processes of this machine. Start at ``driver/barrier.py``.
"""
