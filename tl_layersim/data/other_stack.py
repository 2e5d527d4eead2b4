"""Inputs of the stack of an encoder-decoder that is not read: the encoder's where the decoder is read, and the reverse.

They have positions of their own: each row holds them without padding, and batches pad them on the right with their own mask.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .missing_mask import as_mask, mask_of
from .model_properties import ModelInputs

# Inputs with one value for each position of a stack, by the name of its mask.
ENCODER = {"attention_mask": ("input_ids", "inputs_embeds")}
DECODER = {"decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds")}
DECODER_IDS = "decoder_input_ids"


def reads_decoder(model: ModelInputs) -> bool:
    """Whether the rows of the data are those of a decoder beside an encoder."""
    return model.token_input == DECODER_IDS


def padded_apart(model: ModelInputs) -> tuple[str, ...]:
    """Names of the inputs that have one value for each position of the stack that is not read."""
    other = ENCODER if reads_decoder(model) else DECODER
    return tuple(name for mask, names in other.items() for name in (mask, *names))


def without_padding(inputs: Mapping[str, Tensor], model: ModelInputs) -> dict[str, Tensor]:
    """The inputs of a row, with those of the other stack cut to the positions that it attends to, and with their mask.

    Without a mask, the encoder's padding ids are left out, as those of tokens are. All positions of a decoder count.

    Args:
        inputs: of one row.
        model: the model.

    Raises:
        LayersimError: the mask does not fit, or leaves no position.
    """
    found = dict(inputs)
    for mask, names in (ENCODER if reads_decoder(model) else DECODER).items():
        own = [name for name in names if name in inputs]
        if not own:
            continue
        length = len(inputs[own[0]])
        attended = torch.ones(length, dtype=torch.bool)
        if mask in inputs:
            attended = as_mask(inputs[mask])
        elif own[0] == "input_ids" and (derived := mask_of(inputs[own[0]][None], model)) is not None:
            attended = derived[0]
        if attended.shape != (length,) or not bool(attended.any()):
            raise LayersimError(
                f"`{mask}` has shape {tuple(attended.shape)} and {int(attended.sum())} ones for `{own[0]}` of {length} "
                "positions; it must have a value for each position, and ones for tokens."
            )
        places = attended.nonzero()[:, 0]
        span = slice(int(places[0]), int(places[-1]) + 1)
        found |= {name: inputs[name][span] for name in own} | {mask: attended[span].long()}
    return found


def decoder_mask(rows: Tensor, model: ModelInputs) -> Tensor | None:
    """`mask_of` the tokens of a decoder, of which the first starts the row, and is often the padding id too.

    Raises:
        LayersimError: padding precedes other tokens.
    """
    after = mask_of(rows[:, 1:], model)
    if after is None:
        return None
    if bool((~after[:, 0] & after.any(1)).any()):
        raise LayersimError(
            f"`{model.mask_input}` is missing, but {int((~after[:, 0] & after.any(1)).sum())} of {len(rows)} rows of "
            f"`{model.token_input}` start with padding."
        )
    return torch.cat([torch.ones_like(after[:, :1]), after], 1)


def cut_to_longest(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of some rows of a batch, with those of the other stack cut to the longest of these rows.

    Args:
        inputs: `row ...`; masks among them belong to the other stack.
    """
    found = dict(inputs)
    for mask, names in (ENCODER | DECODER).items():
        own = [name for name in names if name in inputs]
        if mask in inputs and own and inputs[mask].shape == inputs[own[0]].shape[:2]:
            width = int(inputs[mask].any(0).nonzero()[-1]) + 1
            found |= {name: inputs[name][:, :width] for name in (mask, *own)}
    return found


def decoder_alone(given: str, model: ModelInputs) -> LayersimError:
    """The error for data without the tokens of the decoder that is read, or without the encoder's inputs."""
    return LayersimError(
        f"`data` needs the inputs of both stacks to read the decoder of {model.name}, such as `input_ids` and "
        f"`decoder_input_ids`, and holds {given}. With texts or token ids alone, `at='encoder.resid_post'` reads the encoder."
    )
