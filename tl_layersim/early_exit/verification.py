"""Is what comes out of half-run models what the whole model says? Seen once, on a few synthetic tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..models.split_model import LocalSplitModel, logits_of
from ..models.unembed import Unembed, rounding
from .full_sequence import FullSequence, Rows
from .generation import Counts, Decoding
from .supported_models import no_cache, reads_pixels, synthetic

PROMPT, PAD, NEW = 5, 2, 6


def is_causal(half: LocalSplitModel) -> bool:
    """Whether positions know nothing of those behind them."""
    given = synthetic(half, 1, 6)["input_ids"]
    other = given.clone()
    other[0, -1] = (other[0, -1] + 1) % max(2, half.model.vocabulary or 2)
    last = len(half.blocks)
    with torch.no_grad():
        a, b = (half.read(last, lambda ids=ids: half.module(input_ids=ids, **no_cache(half))) for ids in (given, other))  # type: ignore[misc]
    return _gap(a[0, :-1], b[0, :-1]) < 1e-3


@contextmanager
def no_crash(half: LocalSplitModel) -> Iterator[None]:
    """A refusal where a model breaks when it is run in parts.

    Raises:
        LayersimError: it does.
    """
    try:
        yield
    except LayersimError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise LayersimError(
            f"{half.model.name} cannot be run in parts.",
            given=f"{type(error).__name__} on a few tokens: {error}"[:300],
            expected="blocks that hand on one residual stream, and attention that reads the cache that it is given",
            do="a model without recurrent layers or layers that share keys and values",
        ) from error


def check_decoding(half: LocalSplitModel, unembed: Unembed, ends: tuple[int, ...]) -> None:
    """Rows of two lengths, with exits at all depths and tokens that wait, against the model's own forward pass.

    Raises:
        LayersimError: they differ by more than rounding.
    """
    ids = synthetic(half, 2, PROMPT + NEW)["input_ids"]
    attended = torch.ones_like(ids, dtype=torch.bool)
    attended[1, :PAD] = False
    said: dict[int, Tensor] = {}

    def decide(layer: int, rows: list[int], x: Tensor, _entering: Tensor) -> list[int]:
        if layer == ends[-1]:
            said.update(zip(rows, unembed(x), strict=True))
            return []
        # Another depth at each step and in each row; at the last step all go to the end.
        return [row for row in rows if step == NEW or ends[(step + 2 * row) % len(ends)] > layer]

    state = Decoding(half, ends, ids[:, :PROMPT], attended[:, :PROMPT], PROMPT + NEW, Counts())
    with state.watched(decide) as run:
        for step in range(NEW + 1):
            if step:
                state.append(ids[:, PROMPT + step - 1])
            run()
    for row in range(2):
        own = logits_of(half.module(input_ids=ids[row : row + 1, PAD * row :], **no_cache(half)))[0, -1]
        _refuse_if_other(half, said[row], own, "when tokens exit early and run on later")


def check_whole(half: LocalSplitModel, unembed: Unembed, ends: tuple[int, ...], causal: bool) -> None:
    """Rows and positions that leave, against the model's own forward pass.

    Raises:
        LayersimError: they differ by more than rounding.
    """
    given = synthetic(half, 2, 6)
    if unembed.reads == "every":
        asked = torch.ones(2, 6, dtype=torch.bool, device=half.device)
        forced = torch.zeros(2, 6, dtype=torch.int64, device=half.device)
        # The second row: its fourth position stays to the end.
        forced[1, 3] = len(ends)
    else:
        asked = read_position(half, unembed.reads, given)
        forced = torch.zeros(asked.shape, dtype=torch.int64, device=half.device)
        forced[1] = len(ends)
    found, _ = FullSequence(half, unembed, ends, None, forced)(Rows(given, asked, causal))
    own = logits_of(half.module(**given, **no_cache(half)))[1]
    ours = found[1][asked[1]][-1 if unembed.reads != "every" else 3]
    _refuse_if_other(half, ours, own if own.dim() == 1 else own[3], "when rows leave it early")


def read_position(half: LocalSplitModel, reads: str, inputs: dict[str, Tensor], attended: Tensor | None = None) -> Tensor:
    """`row pos`: the one position of each row that a classifier reads."""
    if reads_pixels(half):
        # How many there are, patches and all, is only known when it has run.
        return torch.ones(len(inputs["pixel_values"]), 1, dtype=torch.bool, device=half.device)
    ids = inputs["input_ids"]
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    if reads == "first":
        chosen[:, 0] = True
        return chosen
    pad = getattr(half.module.config, "pad_token_id", None)
    real = ids != pad if isinstance(pad, int) else torch.ones_like(chosen) if attended is None else attended
    last = (real * torch.arange(1, ids.shape[1] + 1, device=ids.device)).argmax(1)
    return chosen.scatter(1, last[:, None], True)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _refuse_if_other(half: LocalSplitModel, ours: Tensor, own: Tensor, when: str) -> None:
    gap = _gap(ours, own) if ours.shape == own.shape else float("inf")
    if not gap <= rounding(own.dtype, next(half.module.parameters()).dtype):
        raise LayersimError(
            f"{half.model.name} does not say what it says by itself {when}.",
            given=f"logits that differ by {gap:.3g} of their norm",
            expected="the same up to rounding",
            do="a model whose blocks run one after the other and keep keys and values in the cache that they are given; "
            "layers=[...] and unembed=[...] name its blocks and its head",
        )
