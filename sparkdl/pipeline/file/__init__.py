"""Reading a pipeline file: every mistake at once, each with its line, before anything starts.

Enters: YAML, the environment, overrides. Leaves: ``PipelineFile``, whose ``spec`` the steps read, or one
``PipelineFileError``. Follow ``load.py``: tree (lines) -> overrides -> decode (environment) -> conflicts.
"""

from sparkdl.pipeline.file.load import PipelineFile, draft, load, loads

__all__ = ["PipelineFile", "draft", "load", "loads"]
