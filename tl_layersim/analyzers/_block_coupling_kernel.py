"""Sums of block coupling over prompts: the kernel of `BlockCoupling`.

It is serialised by value and runs on servers too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..activations.view import View, row_ends
from ..jacobians.coupling import Connections, CouplingOptions, couple, miscoupling, pick_method
from ._values_by_row import sums_by_row

# Number of ranges of prompt lengths: 1, 2 to 3, 4 to 7, ...
OCTAVES = 21
# Fields whose means are over the prompts on which they are defined.
ALIGNMENTS = ("left_alignment", "right_alignment", "cross_alignment")
LINEAR = ("path_error", "update_error", "left_share", "right_share")


def block_coupling_kernel(
    view: View, *, options: CouplingOptions, positions: tuple[int, ...], normalize: bool, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """For every pair of blocks, sums over prompts of their coupling.

    Args:
        view: activations of one batch, with the calls of the blocks.
        options: as in `BlockCoupling`, with the method "auto" too.
        positions: indices of the tokens of each prompt.
        normalize: whether to sum m~ instead of m.
        rows: indices of all rows of the data, to sum by row; None not to sum by row.
    """
    calls = view.calls
    assert calls is not None
    blocks, d_model = len(calls), view.activations.shape[-1]
    ends = row_ends(view)
    starts = torch.cat([ends.new_zeros(1), ends[:-1] + 1])
    at = torch.cat([ends + 1 + p if p < 0 else starts + p for p in positions]).to(calls[0].hidden.device)
    row, token = view.sequence[at], view.position[at]
    where = token[:, None].expand(-1, blocks)
    if options.method == "auto":
        options = replace(options, method=pick_method(d_model, blocks, min(max(options.ks), d_model)))
    found = couple(calls, Connections(row, tuple(range(blocks)), where, where), options, path=True)
    assert found.path is not None
    defined = found.defined
    kept = defined.double()
    values, random = (miscoupling(found.off, found.norm), found.null_miscoupling) if normalize else (found.off, found.null_off)
    values, random = values * kept, random * kept
    other = ~torch.eye(blocks, dtype=torch.bool, device=values.device) & defined[0]
    # Mean coupling of each prompt; a single block has no pairs.
    score = (float(normalize) - values[0]).where(other, 0.0).sum((1, 2)) / other.sum((1, 2)).clamp(min=1)
    length = (view.position[ends] + 1).repeat(len(positions)).to(values.device)
    octave = length.double().log2().floor().long().clamp(0, OCTAVES - 1)
    by_length = partial(sums_by_row, row=octave, rows=torch.arange(OCTAVES))
    with_pairs = other.any(-1).any(-1).double()
    spectrum = found.singular_values.double()
    means = dict(zip(ALIGNMENTS, found.alignment, strict=True)) | {name: getattr(found.path, name) for name in LINEAR}
    out = {
        "samples": torch.tensor(len(row)),
        "batches": torch.tensor(1),
        "width": torch.tensor(len(row) * d_model),
        "count": defined.sum(1),
        "total": values.sum(1),
        "square": values[0].square().sum(0),
        "null": random.sum(1),
        "spectrum": spectrum.sum(0),
        "spectrum_square": spectrum.square().sum(0),
        "residual": found.residual.sum(0),
        "step_error": found.step_error.sum(0),
        "general": found.whole_rows.long(),
        "differs": found.failures & 1,
        "no_skip": found.failures & 2,
        "length_count": by_length(with_pairs).long(),
        "length_total": by_length(score * with_pairs),
        "length_square": by_length(score.square() * with_pairs),
    }
    for name, each in means.items():
        finite = each.isfinite()
        out |= {name: each.where(finite, 0).sum(0), f"{name} count": finite.sum(0)}
    if rows is not None:
        assert view.row is not None
        of = view.row[at.to(view.row.device)]
        out["prompt coupling"] = sums_by_row(score * with_pairs, of, rows)
        out["prompt count"] = sums_by_row(with_pairs, of, rows)
        out["prompt tokens"] = sums_by_row(torch.ones(len(view.row)), view.row, rows)
    return out
