"""Where the bytes of a shard set lie: mapped files, the host's cache of fetched blocks, buffers used again.

Enters: a manifest. Leaves: addresses of checked blocks, and buffers to gather into. Start at ``blocks.py``.
"""
