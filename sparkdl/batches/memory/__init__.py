"""The memory of a shard set's bytes: mapped files, the host's cache of fetched blocks, buffers used again.

Enters: a manifest. Leaves: addresses of checked blocks, and buffers to gather into. Start at ``blocks.py``, which says
what readers ask of blocks; ``mapped.py`` has those of this machine, ``cached.py`` fetches others into ``cache.py``;
both lie in one ``address_space.py``. ``buffer_pool.py`` hands memory out again.
"""
