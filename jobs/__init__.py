"""The journey of the ride data as spark-submit entry points over one YAML configuration.

Enters: raw ride events in files. Leaves: Delta tables, a published model, predictions, a report.

Every job runs in three ways: ``spark-submit jobs/etl.py``, ``python jobs/etl.py`` and ``python -m jobs.etl``, each with
``--config jobs/retrain.yaml`` and overrides such as ``--set.events.rows=50000``. Exit codes: see ``jobs.entry``.
``jobs/pipeline.py`` is none of them: it runs any pipeline file.
"""
