"""Stage 6: a model and a table in, predictions out.

``score.py`` plans on the driver and starts one ``mapInArrow`` stage; ``worker.py`` runs in Spark's Python workers.
"""
