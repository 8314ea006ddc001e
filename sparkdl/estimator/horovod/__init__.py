"""The names that users of other libraries bring along: Horovod's functions and runners, Spark's TorchDistributor."""
