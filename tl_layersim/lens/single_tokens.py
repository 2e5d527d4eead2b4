"""Single tokens whose logits are followed through the layers: text or ids, the same for all rows or one for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..core.wording import brief
from ..data.batches import Batch
from ..data.labels import number_tensor
from ..sources.model_description import ModelDescription

# Values of the arguments that `token_ids` reads.
TOKENS_IN_WORDS = "the text of one token, a token id, or a list of these with one for each row"


def as_tokens(tokens: Any, argument: str) -> Any:
    """The option of an analyzer that names tokens, with arrays as tensors; text, numbers, lists and None as they are.

    Args:
        tokens: the option as the user gave it.
        argument: its name, for the message.

    Raises:
        LayersimError: the value is of another kind.
    """
    if isinstance(tokens, str | int | float | list | tuple | None):
        return tokens
    return number_tensor(tokens, argument, TOKENS_IN_WORDS)


def has_rows(tokens: Any) -> bool:
    """Whether an option names a token for each row of the data, and not one token for all rows."""
    return isinstance(tokens, list | tuple) or (isinstance(tokens, Tensor) and tokens.dim() > 0)


def token_ids(tokens: Any, model: ModelDescription, argument: str) -> int | Tensor | None:
    """Token ids of text or numbers: an int for one token, `row` for one token for each row; None for None.

    Args:
        tokens: text, a token id, or a list, an array or a tensor of these.
        model: the model, whose tokenizer reads text.
        argument: the caller's argument, for messages.

    Raises:
        LayersimError: a text is not exactly one token, the model has no tokenizer, or the value is of another kind.
    """
    if tokens is None:
        return None
    if isinstance(tokens, str):
        return _id_of_text(tokens, model, argument)
    items = list(tokens) if isinstance(tokens, list | tuple) else []
    if any(isinstance(item, str) for item in items):
        ids = [_id_of_text(item, model, argument) if isinstance(item, str) else item for item in items]
        return token_ids(ids, model, argument)
    ids_of_numbers = number_tensor(tokens, argument, TOKENS_IN_WORDS)
    dtype = ids_of_numbers.dtype
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    if not is_whole or ids_of_numbers.dim() > 1 or ids_of_numbers.numel() == 0:
        raise LayersimError(f"`{argument}` is {brief(tokens)}; it must be {TOKENS_IN_WORDS}.")
    if int(ids_of_numbers.min()) < 0:
        raise LayersimError(f"`{argument}` has the id {int(ids_of_numbers.min())}; token ids begin with 0.")
    if model.vocabulary is not None and int(ids_of_numbers.max()) >= model.vocabulary:
        raise LayersimError(
            f"`{argument}` has the id {int(ids_of_numbers.max())}; the ids of {model.name} are 0 to {model.vocabulary - 1}."
        )
    return ids_of_numbers.long() if ids_of_numbers.dim() else int(ids_of_numbers)


def token_id(token: Any, model: ModelDescription, argument: str) -> int:
    """The id of one token; see `token_ids`."""
    token_as_id = token_ids(token, model, argument)
    if not isinstance(token_as_id, int):
        raise LayersimError(f"`{argument}` is {brief(token)}; it must be the text of one token, or a token id.")
    return token_as_id


def refuse_rows(ids: Tensor, batch: Batch, argument: str) -> None:
    """Raise an error if a batch has rows for which there is no token.

    Args:
        ids: `row`, a token id for each row of the data.
        batch: the next batch of the model.
        argument: the caller's argument, for the message.

    Raises:
        LayersimError: there are fewer ids than rows.
    """
    row_count = int(batch.sources[0].max()) + 1
    if row_count > len(ids):
        raise LayersimError(
            f"`{argument}` has {len(ids)} tokens; it must have one for each of the {row_count} rows of the data."
        )


def _id_of_text(text: str, model: ModelDescription, argument: str) -> int:
    """Id of a text that is one token.

    A tokenizer of bytes has two tokens for a word, with and without a leading space. A warning says so if `text` is the one
    without.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise LayersimError(f"`{argument}` is {brief(text)}, but {model.name} has no tokenizer to read it. Pass a token id.")
    if model.head is not None and model.head.classifies:
        raise LayersimError(
            f"`{argument}` is {brief(text)}, but the head of {model.name} predicts classes. Pass the index of a class."
        )
    ids = _encoded(tokenizer, text)
    spaced = f" {text}"
    spaced_ids = _encoded(tokenizer, spaced) if text[:1].strip() else []
    has_spaced_token = len(spaced_ids) == 1
    if len(ids) != 1:
        remedy = "Pass the id of one token."
        if has_spaced_token:
            remedy = f"With a leading space it is one token: {spaced!r}."
        raise LayersimError(f"`{argument}` is {brief(text)}, which is {len(ids)} tokens: {_listed(tokenizer, ids)}. {remedy}")
    if ids[0] == getattr(tokenizer, "unk_token_id", None) and text != getattr(tokenizer, "unk_token", None):
        raise LayersimError(
            f"`{argument}` is {brief(text)}, which the tokenizer of {model.name} does not know: it reads "
            f"{_listed(tokenizer, ids)}."
        )
    if has_spaced_token and spaced_ids != ids:
        warn(
            f"`{argument}` is {brief(text)}, the token {_listed(tokenizer, ids)}. After a word, it is the token with a leading "
            f"space, {_listed(tokenizer, spaced_ids)}: pass {spaced!r} for that one."
        )
    return ids[0]


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens around it."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _listed(tokenizer: Any, ids: list[int]) -> str:
    """Tokens as text, with their ids."""
    return ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in ids)
