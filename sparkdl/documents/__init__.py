"""How values become files and files become values again: JSON documents, tensor trees, payloads, folders.

Enters: frozen dataclasses, nested state, Python objects. Leaves: files that are whole or not there, and the same values
read back, or one typed error that names file and field.
"""
