"""The carriers of tensors between ranks: Horovod, torch.distributed, or nothing where there is one rank.

Enters: a world, and where its ranks meet. Leaves: a ``Collective`` (``collective/base.py``), a file an implementation.
``group.py`` builds all of it out of a few operations that ``horovod.py`` and ``torch_distributed.py`` add; one contract
test runs over all of them. Start at ``group.py``.
"""
