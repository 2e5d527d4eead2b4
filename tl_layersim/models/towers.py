"""The two towers of a CLIP: their modules from the residual stream to the space that both share, and the position of a text.

A new kind of model is one entry in the table `TOWERS_BY_TYPE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief, with_article
from ..data.positions import PositionRule
from ..data.text_rows import DEFAULT_SEQ_LEN
from .unembed import Head


@dataclass(frozen=True)
class Tower:
    """One tower of a model of images and texts, by module path.

    Attributes:
        name: "vision" or "text".
        path: of the tower in the model.
        blocks: path of the list of blocks in the tower.
        head: final norm and projection, as paths in the model; the norm is "" where the blocks end in one.
        end_of_text: whether a text is read at its end-of-text token; else a row is read at its first position, [CLS].
    """

    name: Literal["vision", "text"]
    path: str
    blocks: str
    head: Head
    end_of_text: bool = False


def _vision() -> Tower:
    head = Head("vision_model.post_layernorm", ("visual_projection",), reads="first")
    return Tower("vision", "vision_model", "encoder.layers", head)


def _text(blocks: str, norm: str, *parts: str, end_of_text: bool = False) -> Tower:
    return Tower("text", "text_model", blocks, Head(norm, (*parts, "text_projection"), reads="first"), end_of_text)


_CLIP_TOWERS = (_vision(), _text("encoder.layers", "text_model.final_layer_norm", end_of_text=True))
# Vision and text tower, by the `model_type` of the configuration.
TOWERS_BY_TYPE = {
    "clip": _CLIP_TOWERS,
    "metaclip_2": _CLIP_TOWERS,
    # A BERT, whose blocks end in a norm.
    "chinese_clip": (_vision(), _text("encoder.layer", "")),
    "altclip": (_vision(), _text("roberta.encoder.layers", "text_model.pre_LN", "text_model.transformation")),
}
CLASSES = "CLIPModel, MetaClip2Model, ChineseCLIPModel or AltCLIPModel of transformers"


def find_towers(model: Any) -> tuple[Tower, Tower]:
    """The vision and the text tower of a model.

    Args:
        model: a Hugging Face model with both.

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


def has_both_towers(module: torch.nn.Module) -> bool:
    """Whether a model has a vision and a text tower, as CLIP and SigLIP have."""
    return hasattr(module, "vision_model") and hasattr(module, "text_model")


def blocks_of_tower(module: torch.nn.Module, paths: list[str]) -> tuple[str, list[int]] | None:
    """The name of the tower in which modules are blocks, and their numbers; None for any other modules.

    Args:
        module: the model.
        paths: of its modules.

    Raises:
        LayersimError: the modules lie in both towers.
    """
    if not has_both_towers(module):
        return None
    inside = [name for name in ("vision", "text") if any(path.startswith(f"{name}_model.") for path in paths)]
    if len(inside) == 2:
        raise two_towers(module, "`layers` with modules of both towers")
    parents = {path.rpartition(".")[0] for path in paths}
    numbers = [path.rpartition(".")[2] for path in paths]
    if not inside or len(parents) > 1 or not all(number.isdecimal() for number in numbers):
        return None
    return inside[0], [int(number) for number in numbers]


def two_towers(module: torch.nn.Module, given: str) -> LayersimError:
    """The error for a model of two towers of which one is to be read.

    Args:
        module: the model.
        given: what leaves the tower open.
    """
    return LayersimError(
        f"{type(module).__name__} has a vision and a text tower, with inputs and positions of their own, and a call reads "
        f"one: {given}. Pass model.vision_model or model.text_model, or use tower_similarity(clip, pairs)."
    )


def refuse_no_projection(model: torch.nn.Module, towers: tuple[Tower, ...], do: str) -> None:
    """Refuse a model that lacks a module between the blocks of a tower and the shared space.

    Args:
        model: with these towers.
        towers: to be projected.
        do: the call that works without projections, for the message.

    Raises:
        LayersimError: names the module.
    """
    names = dict(model.named_modules())
    missing = [path for tower in towers for path in (tower.head.norm, *tower.head.modules) if path and path not in names]
    if missing:
        raise LayersimError(f"{type(model).__name__} lacks `{missing[0]}`, without which its towers share no space. Use {do}.")


def text_position(model: torch.nn.Module, tower: Tower) -> PositionRule:
    """The rule that selects the position of a text that the model reads.

    Args:
        model: with this tower.
        tower: of texts.
    """
    if not tower.end_of_text:
        return "first"
    text = model.get_submodule(tower.path)
    eos: Any = getattr(text, "eos_token_id", None)
    # Configurations of OpenAI's models name a wrong id, 2. For these CLIP reads the highest id of a row.
    highest = eos == 2 and getattr(getattr(text, "config", None), "model_type", "") == "clip_text_model"
    return partial(end_of_text, eos=None if highest else int(eos))


def end_of_text(tokens: Tensor, *, eos: int | None) -> Tensor:
    """Index of the end-of-text token in a row, the first one.

    Args:
        tokens: `pos`, the token ids of the row.
        eos: its id; None for the highest id of the row.

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
    """Refuse a text that was cut into several rows, of which one alone would belong to its image.

    A text that is padded on the left starts after its padding, and is read without it.

    Args:
        starts: for each row, its start position in its text, or in its row of padded token ids.
        context: length of the longest text, at which longer ones are cut.

    Raises:
        LayersimError: a row continues a text.
    """
    # The first part of a longer text fills the context, but for a BOS of its own.
    if max(starts) >= min(DEFAULT_SEQ_LEN, context or DEFAULT_SEQ_LEN) - 1:
        raise LayersimError(
            f"`data` has a text of more than {max(starts)} tokens; the context of the text tower has {context}. Cut the "
            "texts with tokenizer(texts, padding=True, truncation=True)."
        )
