"""The store of a run, held by the test's own process, for ranks that no launcher started."""

from __future__ import annotations

import secrets
from contextlib import contextmanager

from sparkdl.launch.store import KeyValueStore, StoreClient, offered
from sparkdl.launch.wire import Listener, authenticated


@contextmanager
def held_store(host="127.0.0.1"):
    """Hold a store for the block; yield a client of it, which may travel to other processes."""
    secret, store = secrets.token_bytes(32), KeyValueStore()
    listener = Listener(host, authenticated(secret), store.serve)
    client = StoreClient(listener.address, secret)
    try:
        yield client
    finally:
        client.close()
        store.close()
        listener.close()


def at_store(services, store, job, world):
    """Be a rank that meets the others at ``store``, as the launcher would have it."""
    import os
    from contextlib import ExitStack

    with ExitStack() as stack:
        stack.callback(store.close)
        stack.enter_context(offered(store))
        for service in services:
            os.environ.update(stack.enter_context(service(store)))
        return job(world)
