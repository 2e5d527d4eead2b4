"""The last layer's loss with a CKA regulariser."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .regularised_objective import RegularisedObjective


class CKARegularisedObjective(RegularisedObjective):
    r"""The last layer's loss with a CKA regulariser, $CE_L + \beta \sum_l w_l (1 - \mathrm{CKA}(x^l, x^L))$.

    CKA is linear and biased, over the positions with a target, of the head's input before the final norm. It relates the
    samples of one forward pass to each other, so that the loss of rows depends on the rows beside them.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 3 and appendix B.3, "Another approach"; without an equation there.
    """

    name = "cka-reg"
    own_settings = ("beta",)

    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        last = _centred(features[self.stream.n_layers])
        with torch.autocast(last.device.type, enabled=False):
            distances = []
            for layer, weight in enumerate(self.weights[:-1], 1):
                distances.append(weight * (1 - _cka(_centred(features[layer]), last)))
            return torch.stack(distances).sum() if distances else last.sum() * 0


def _centred(x: Tensor) -> Tensor:
    """Samples (`sample width`) minus their mean, scaled to Frobenius norm 1."""
    x = x if x.dtype == torch.float64 else x.float()
    x = x - x.sum(0) / max(1, len(x))
    unit: Tensor = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    return unit


def _cka(x: Tensor, y: Tensor) -> Tensor:
    """Biased linear CKA of two sets of centred samples (both `sample width`)."""
    # The smaller of the two Gram matrices, of samples or of features. Both have the same CKA.
    if len(x) < x.shape[1]:
        covariance = ((x @ x.T) * (y @ y.T)).sum()
        norms = (x @ x.T).norm() * (y @ y.T).norm()
    else:
        covariance = (x.T @ y).square().sum()
        norms = (x.T @ x).norm() * (y.T @ y).norm()
    cka: Tensor = covariance / norms.clamp(min=torch.finfo(norms.dtype).tiny)
    return cka
