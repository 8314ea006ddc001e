"""A pipeline for a table that nobody has described: what was seen of it becomes a file with every choice explained.

Enters: the name of a pipeline, and a table. Leaves: a folder with the pipeline file and what belongs to it. Follow
``init.py``: table and text (rows) -> profile -> roles, features, split (choices) -> write (text) -> a folder, with what
lies in ``templates``.
"""

from sparkdl.pipeline.init.init import Initialised, init

__all__ = ["Initialised", "init"]
