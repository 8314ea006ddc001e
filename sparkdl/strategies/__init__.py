"""Strategies that spread a model over the ranks: parameters, gradients and optimizer state, and what travels.

Enters: functions that make a model and its optimizer, then batches and an objective. Leaves: the gradients of the
global batch, and the whole state on the leader, whatever lay where. Start at ``base.py``, the contract. ``choice.py``
reads what a user writes: a name of ``STRATEGIES``, a mesh (``mesh.py``, done by ``mesh_strategy.py``), steps that each
rank makes by itself (``local_steps.py``, done by ``local_sgd.py``), or parameters on servers (``server_options.py``,
done by ``parameter_server.py`` with ``server.py``, ``served_embedding.py`` and ``served_collective.py``). A mesh is
made of ``sharded.py``, ``expert.py``, ``tensor_plan.py`` and ``tensor.py``, and for pipelines of ``model_trace.py``,
``stage_balance.py``, ``stages.py`` and ``pipeline.py``. ``planner.py`` estimates what each would take.
"""

STRATEGIES = {
    "all_reduce": "sparkdl.strategies.all_reduce:AllReduce",
    "zero1": "sparkdl.strategies.zero1:Zero1",
}
"""The place of each class by name; it is loaded when asked for. ``choice.PRESETS`` has those that take options."""
