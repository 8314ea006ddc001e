"""Stage 5: a trained model in, published versions and aliases out.

Enters: a module and its signature. Leaves: a bundle, a folder that holds no code, and a registry of versions of it.
Start at ``bundle.py``.
"""
