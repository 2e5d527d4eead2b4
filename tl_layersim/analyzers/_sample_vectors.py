"""Samples of a view: tokens, or rows of tokens as one vector each.

Plain functions of torch: they run inside the kernels that call them, also on a server.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.chunked_logit_lens import read_vectors
from ..models.view import View, row_ends


def samples(view: View, *, level: str, pool: str) -> Tensor:
    """Samples of a view, `layer sample d_model`: each counted token, or one vector for each row of tokens.

    Args:
        view: activations of one batch.
        level: "token" or "sequence".
        pool: for "sequence", the "mean" of the row's counted tokens, its "last" or its "first"; "head" for the vector that the
            model's head reads of a row.
    """
    if level == "token":
        return view.activations
    if pool == "head":
        return read_vectors(view, view.activations)
    ends = row_ends(view)
    if pool == "last":
        return view.activations[:, ends]
    lengths = torch.diff(ends, prepend=ends.new_tensor([-1]))
    if pool == "first":
        return view.activations[:, ends - lengths + 1]
    return torch.stack([rows.mean(1) for rows in torch.split(view.activations, lengths.tolist(), dim=1)], dim=1)
