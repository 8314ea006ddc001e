"""What carries tensors between ranks: Horovod, torch.distributed, or nothing where there is one rank.

Each file is one implementation of the Protocol in ``collective/base.py``; one contract test runs over all of them.
"""
