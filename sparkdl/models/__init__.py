"""Stage 5 of 6: a trained model in, published versions and aliases out.

Enters: a module and its signature. Leaves: a bundle, a folder that holds no code, and a registry of versions of it.
What a bundle may make its reader import is the reader's decision alone (``trust.py``, ``importing.py``).
Start at ``bundle.py``, then ``recipe.py``; the registry at ``registry/registry.py``.
"""
