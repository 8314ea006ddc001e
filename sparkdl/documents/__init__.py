"""Values as files, and files as values again: one way for each kind.

Enters: frozen dataclasses, nested state, Python objects; bytes that anybody may have written. Leaves: files that are
whole or not there; the same values, or one typed error that names file and field.
Start at ``typed.py`` (JSON documents); ``trees.py`` and ``tensors.py`` hold state without code, ``payload.py`` what
travels pickled and signed, ``atomic_folder.py`` folders that are replaced as one.
"""
