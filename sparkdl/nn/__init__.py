"""Layers for the user's own models, whose meaning no number of ranks changes.

Enters: tensors of one rank. Leaves: what the layer makes of them, as one rank with the global batch would. Each is a
plain ``torch.nn.Module`` in a script, a notebook and where a published model scores. Start at ``mixture.py``.
"""

from sparkdl.nn.mixture import MixtureOfExperts
from sparkdl.nn.poisson_loss import PoissonLoss
from sparkdl.nn.quantile_loss import QuantileLoss

__all__ = ["MixtureOfExperts", "PoissonLoss", "QuantileLoss"]
