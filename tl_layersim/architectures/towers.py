"""The two towers of a CLIP: their projections to the shared embedding space, and the position at which a text is read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief, with_article
from ..data.positions import PositionRule
from ..data.texts import DEFAULT_SEQ_LEN
from .blocks import has_both_towers
from .layouts import CLASSES, TOWERS_BY_TYPE, Tower


def find_towers(model: Any) -> tuple[Tower, Tower]:
    """The vision and the text tower of a model.

    Args:
        model: a Hugging Face model with both towers.

    Raises:
        LayersimError: the model is of another kind.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    whole = isinstance(model, torch.nn.Module) and has_both_towers(model)
    towers = TOWERS_BY_TYPE.get(str(kind)) if whole else None
    if towers is not None:
        return towers
    if whole and str(kind).startswith("siglip"):
        raise LayersimError(
            f"`clip` is {with_article(type(model).__name__)}, which pools all positions of an image by attention; it must be "
            f"{CLASSES}."
        )
    raise LayersimError(f"`clip` is {brief(model)}; it must be {CLASSES}.")


def refuse_no_projection(model: torch.nn.Module, towers: tuple[Tower, ...], do: str) -> None:
    """Raise an error if a model lacks the final norm or the projection of a tower.

    Args:
        model: the model.
        towers: its towers.
        do: the call to use instead, for the message.

    Raises:
        LayersimError: names the module.
    """
    names = dict(model.named_modules())
    missing = [path for tower in towers for path in (tower.head.norm, *tower.head.modules) if path and path not in names]
    if missing:
        raise LayersimError(f"{type(model).__name__} lacks `{missing[0]}`, without which its towers share no space. Use {do}.")


def text_position(model: torch.nn.Module, tower: Tower) -> PositionRule:
    """The position rule for texts: the position at which the text tower is read.

    Args:
        model: the model.
        tower: its text tower.
    """
    if not tower.end_of_text:
        return "first"
    text = model.get_submodule(tower.path)
    eos: Any = getattr(text, "eos_token_id", None)
    # Configurations of OpenAI's models name a wrong id, 2. For these CLIP reads the highest id of a row.
    highest = eos == 2 and getattr(getattr(text, "config", None), "model_type", "") == "clip_text_model"
    return partial(end_of_text, eos=None if highest else int(eos))


def end_of_text(tokens: Tensor, *, eos: int | None) -> Tensor:
    """Index of the first end-of-text token in a row.

    Args:
        tokens: `pos`, the token ids of the row.
        eos: id of the end-of-text token; None for the highest id in the row.

    Raises:
        LayersimError: the row has no such token.

    Examples:
        >>> end_of_text(torch.tensor([1, 5, 9, 9]), eos=9), end_of_text(torch.tensor([1, 5, 7, 3]), eos=None)
        (tensor(2), tensor(2))
    """
    if eos is None:
        return tokens.argmax()
    found = (tokens == eos).nonzero()[:, 0]
    if not len(found):
        raise LayersimError(
            f"`data` has a text of {len(tokens)} tokens, none of them {eos}, the end-of-text token at which the text tower "
            "is read. Give texts with tokenizer=processor, or cut them with tokenizer(texts, truncation=True)."
        )
    return found[0]


def text_starts_anew(starts: list[int], context: int | None) -> None:
    """Raise an error if a text was cut into several rows, because only one row can belong to its image.

    A text that is padded on the left starts after its padding, and is read without it.

    Args:
        starts: for each row, its start position in its text or in its padded row.
        context: context length of the text tower.

    Raises:
        LayersimError: a row continues a text.
    """
    # The first part of a longer text fills the context, but for a BOS of its own.
    if max(starts) >= min(DEFAULT_SEQ_LEN, context or DEFAULT_SEQ_LEN) - 1:
        raise LayersimError(
            f"`data` has a text of more than {max(starts)} tokens; the context of the text tower has {context}. Cut the "
            "texts with tokenizer(texts, padding=True, truncation=True)."
        )
