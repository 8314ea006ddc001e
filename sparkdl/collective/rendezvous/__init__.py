"""The rendezvous of the ranks of a collective: the store of their run, which only its ranks can read.

The launcher holds it and hands each rank a client of it (``launch/store.py``); ``torch_store.py`` gives it to
torch.distributed, ``horovod_store.py`` to Horovod's C++ client, over HTTP that does not leave the host.
"""
