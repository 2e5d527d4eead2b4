"""The last layer's loss with a cosine regulariser."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...activations.norms import scaled
from .regularised_objective import RegularisedObjective


class CosineRegularisedObjective(RegularisedObjective):
    r"""The last layer's loss with a cosine regulariser, $CE_L + \beta \sum_l w_l (1 - \cos(x^l, x^L))$.

    The regulariser is a mean over the positions with a target, of the head's input before the final norm; with
    `cosine_over="attended"`, over all attended positions.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.3, "Alternative Approach for Enhancing Layer-wise Representation
        Similarity".
    """

    name = "cosine-reg"
    own_settings = ("beta", "cosine_over")

    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        last = _rescaled(features[self.stream.n_layers])
        distances = []
        for layer, weight in enumerate(self.weights[:-1], 1):
            cosines = nn.functional.cosine_similarity(_rescaled(features[layer]), last, dim=-1)
            distances.append(weight * (1 - cosines).sum() / max(1, len(last)))
        # A model of one block has no layer below the last; 0 times the features keeps the graph of gradients.
        return torch.stack(distances).sum() if distances else last.sum() * 0


def _rescaled(x: Tensor) -> Tensor:
    """Vectors rescaled so that their squares do not overflow."""
    return scaled(x if x.dtype == torch.float64 else x.float())[0]
