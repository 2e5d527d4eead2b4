"""Chat messages: their recognition in data, and their rendering and tokenisation by a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import TemplateError
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief, first_line
from .data import Data
from .inputs import ATTACH, as_plain, innermost
from .rows import ModelInputs
from .texts import tokenizer_of

# How a template marks the tokens of the assistant.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Chat:
    """A chat in the data.

    Attributes:
        messages: mappings with role and content, in order; None if the row has no chat.
        label: class of the chat, None if the data has no labels.
        inputs: further inputs of the row by name, without an axis of rows.
    """

    messages: list[dict[str, Any]] | None
    label: int | None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class EncodedChat(NamedTuple):
    """Token ids of a chat, including the special tokens that the template writes.

    Attributes:
        ids: the token ids.
        marks: for each token, whether it belongs to the assistant; None unless requested.
    """

    ids: list[int]
    marks: list[bool] | None


def is_chat(value: Any) -> bool:
    """Whether a value is one or several chats: lists of mappings with role and content."""
    value = innermost(value)
    return isinstance(value, Mapping) and {"role", "content"} <= set(value)


def chats_in(value: Any) -> list[list[dict[str, Any]] | None]:
    """The chats in a column: one for an example, several for a batch or a table."""
    value = _as_messages(value)
    if any(isinstance(item, Mapping) and not isinstance(item.get("role"), list) for item in value):
        return [value]
    return [None if chat is None else _as_messages(chat) for chat in value]


def _as_messages(value: Any) -> Any:
    """A chat as a list of messages, also if a data set stores it as lists of roles and of contents."""
    if isinstance(value, Mapping):
        return [dict(zip(value, fields, strict=True)) for fields in zip(*value.values(), strict=True)]
    return as_plain(value)


@dataclass(frozen=True)
class ChatEncoder:
    """Renders chats by a template and tokenises them. All special tokens come from the template: no BOS is added.

    Args:
        model: the model whose tokenizer is used.
        data: the options `chat_template`, `add_generation_prompt` and `positions`.
    """

    model: ModelInputs
    data: Data

    def encode(self, chat: Chat, number: int) -> EncodedChat:
        """The tokens of a chat.

        Args:
            chat: the chat.
            number: index of its row in the data, for messages.

        Raises:
            LayersimError: there is no template, it cannot render the chat, or it does not mark the assistant's tokens.
        """
        template, tokenizer = self._template(), self.model.tokenizer
        messages = _text_messages(chat.messages, number)
        given = {"chat_template": template, "add_generation_prompt": self.data.add_generation_prompt}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **given)
            if self.data.selection.rule != "assistant":
                return EncodedChat(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], None)
            spans = _assistant_spans(tokenizer, messages, text, given)
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LayersimError(
                f"`data` has a chat in row {number} that the chat template cannot render: {type(error).__name__}: "
                f"{first_line(error)}."
            ) from error
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        marks = [
            any(start < stop and max(end, start + 1) > begin for begin, stop in spans)
            for start, end in encoded["offset_mapping"]
        ]
        return EncodedChat(encoded["input_ids"], marks)

    def refuse_idle_options(self) -> None:
        """Raise an error if an option of chats is set and the data has no chats."""
        if self.data.chat_template is not None or self.data.add_generation_prompt:
            name = "add_generation_prompt" if self.data.chat_template is None else "chat_template"
            raise LayersimError(f"`{name}` applies to chat messages only, and `data` holds texts or tokens.")

    def _template(self) -> str:
        """The text of the template. Raise an error if `positions` needs marks that the template lacks."""
        tokenizer = tokenizer_of(self.model)
        try:
            template: str = tokenizer.get_chat_template(self.data.chat_template)
        except (AttributeError, ValueError):
            raise LayersimError(
                f"`data` contains chat messages, and the tokenizer of {self.model.name} has no chat template for them. Pass "
                "`Data(..., chat_template=...)` with the template that they are meant for."
            ) from None
        if self.data.selection.rule == "assistant" and not (GENERATION.search(template) and tokenizer.is_fast):
            raise LayersimError(
                "`positions='assistant'` needs a chat template that marks the assistant's tokens, and a fast tokenizer. "
                + (
                    "This tokenizer is not fast."
                    if GENERATION.search(template)
                    else "Write {% generation %} ... {% endgeneration %} around the assistant's messages in `chat_template`."
                )
            )
        return template


def _assistant_spans(
    tokenizer: Any, messages: list[dict[str, Any]], text: str, given: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """Start and end (exclusive) of each part of the rendered text that the template marks.

    `return_assistant_tokens_mask=True` maps these characters to tokens one by one: where a part begins or ends with a character
    without a token, as spaces are to some tokenizers, its mask ends too early or too late.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, spans = render_jinja_template(
        [messages], return_assistant_tokens_mask=True, **given, **tokenizer.special_tokens_map
    )
    if rendered[0] != text:
        raise ValueError("the template renders the same messages differently with marks")
    return [(int(start), int(stop)) for start, stop in spans[0]]


def _text_messages(messages: list[dict[str, Any]] | None, number: int) -> list[dict[str, Any]]:
    """The messages without empty fields. Raise an error if there are none, or if one holds more than text."""
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise LayersimError(
            f"`data` has no chat in row {number}, but {brief(messages)}; a chat is a list of messages with role and content."
        )
    for message in messages:
        parts = message.get("content")
        kinds = {part.get("type", "text") for part in parts if isinstance(part, Mapping)} if isinstance(parts, list) else set()
        if kinds - {"text"}:
            raise LayersimError(
                f"`data` has a chat in row {number} with content of type {', '.join(sorted(kinds - {'text'}))}; only text is "
                f"read. Run the model itself on the others: {ATTACH}model(...)."
            )
    found = [{name: value for name, value in message.items() if value is not None} for message in messages]
    for message in found:
        # A template writes nothing for a key that it does not know.
        if "role" not in message or not message.keys() & {"content", "tool_calls"}:
            raise LayersimError(
                f"`data` has a chat in row {number} with a message whose keys are {', '.join(message) or 'none'}; a message "
                "has role and content."
            )
    return found
