"""The driver's side of a launch: checks before it, starts the ranks, watches them, names the one at fault.

A session and a function come in, the ranks' values in rank order go out. Start at ``barrier.py``: ``preflight.py`` and
``cluster.py`` refuse what cannot run, ``channel.py`` hears the ranks, ``launch_plan.py`` tells each its place,
``supervisor.py`` watches until the last has returned; ``stage_rows.py`` is the way without a channel. ``slots.py`` lets
launches that run at the same time wait for each other.
"""
