"""How a model is spread over the ranks: parameters, gradients and optimizer state, and what of them travels.

Enters: functions that make a model and its optimizer, then batches and an objective. Leaves: the gradients of the
global batch, and the whole state on the leader, whatever lay where. Start at ``base.py``, the contract; ``mesh.py`` is
what a user writes, ``mesh_strategy.py`` does it with the parts in ``sharded.py``, ``tensor.py``, ``stages.py``,
``pipeline.py`` and ``expert.py``.
"""

STRATEGIES = {
    "all_reduce": "sparkdl.strategies.all_reduce:AllReduce",
    "zero1": "sparkdl.strategies.zero1:Zero1",
}
"""By name, where the class is; it is loaded when it is asked for. ``mesh.PRESETS`` has the names of meshes."""

MESH_STRATEGY = "sparkdl.strategies.mesh_strategy:MeshStrategy"
