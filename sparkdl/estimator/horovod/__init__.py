"""The names that users of other libraries bring along: Horovod's functions and runners, Spark's TorchDistributor.

Code written for them enters, and what the rest of the house takes leaves. ``adapters.py`` turns losses, metrics and
training steps of Horovod's estimator into those of a ``train.Task`` (start there for a fit); ``runners.py`` has
HorovodRunner, TorchDistributor and log_to_driver, on ``sparkdl.run``. In ``estimator/`` lie Horovod's stores
(``store.py``), its backends (``params/backend.py``), ``prepare_data`` (``data.py``) and ``run_elastic``
(``elastic.py``).
"""
