"""Stage 3 of 5: gradients of each rank in, gradients all ranks agree on out."""

from sparkdl.collective.base import Collective, GradientSync, ReduceOp
from sparkdl.collective.open import open_collective

__all__ = ["Collective", "GradientSync", "ReduceOp", "open_collective"]
