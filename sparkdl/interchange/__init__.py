"""Models for other systems: versions mirrored to MLflow, networks exported to ONNX and ``torch.export``.

Enters: a version of the registry, or a bundle. Leaves: a run, a logged model and a registered version in MLflow
(``mlflow.py``; ``served.py`` is what MLflow loads then, and its name stands in what was logged); or a file that others
run, with its signature beside it as JSON (``export.py``). MLflow and ONNX are extras, loaded by the functions that need
them. No Spark: ``spark_udf`` is MLflow's.
"""
