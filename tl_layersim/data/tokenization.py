"""Tokenisation of texts and chats, and their division into rows of tokens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LOG, LayersimError
from ..core.wording import brief, first_line
from .data import Data, Notes
from .non_token_inputs import ATTACH, as_plain, decoder_alone, innermost, reads_decoder
from .packed_documents import documents_in
from .row import ModelInputs, Row
from .texts import GroupNumbers

SEGMENTS = "token_type_ids"
DEFAULT_SEQ_LEN = 256
TEXTS_AT_ONCE = 64
# How a template marks the tokens of the assistant.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Text:
    """A text, a pair of texts or a chat in the data, with its token ids once it is tokenised.

    Attributes:
        text: the text; None if the row has none, and for a chat.
        label: class of the text, None if the data has no labels.
        second: the second text of a pair; None for a single text.
        messages: the messages of a chat, mappings with role and content, in order; None for a text.
        inputs: further inputs of the row by name, without an axis of rows.
        number: index of the text in the data.
        group: the group of the text, from the data; once texts are numbered, the index in the data of the group's first text.
        ids: token ids of a text without BOS, or of a chat with the special tokens of its template.
        own: whether the text itself begins with a special token, so that no BOS is added.
        segments: the segment id of each token; None if the model takes none or all are 0.
        marks: for each token of a chat, whether it belongs to the assistant; None unless requested.
        cut: whether the text was too long and was cut to one row.
    """

    text: str | None
    label: int | None = None
    second: str | None = None
    messages: Any = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    number: int = -1
    group: Any = -1
    ids: list[int] = field(default_factory=list)
    own: bool = False
    segments: list[int] | None = None
    marks: list[bool] | None = None
    cut: bool = False


def is_chat(value: Any) -> bool:
    """Whether a value is one or several chats: lists of mappings with role and content."""
    value = innermost(value)
    return isinstance(value, Mapping) and {"role", "content"} <= set(value)


def chats_in(value: Any) -> list[Any]:
    """A list of the chats in a column of an example, a batch or a table; () stands for a missing chat."""
    value = _as_messages(value)
    if any(isinstance(item, Mapping) and not isinstance(item.get("role"), list) for item in value):
        return [value]
    return [() if chat is None else _as_messages(chat) for chat in value]


def _as_messages(value: Any) -> Any:
    """Convert a chat to a list of messages. Some data sets store a list of roles and one of contents."""
    if isinstance(value, Mapping):
        return [dict(zip(value, fields, strict=True)) for fields in zip(*value.values(), strict=True)]
    return as_plain(value)


def adds_specials(tokenizer: Any) -> bool:
    """Whether special tokens come from the tokenizer rather than from `prepend_bos`.

    True if the tokenizer has [CLS], has no BOS, or adds at least two special tokens, as CLIP's does.
    """
    if tokenizer.bos_token_id is None or tokenizer.cls_token_id is not None:
        return True
    count = getattr(tokenizer, "num_special_tokens_to_add", None)
    return count is not None and bool(count() >= 2)


def tokenizer_of(model: ModelInputs) -> Any:
    """The tokenizer of a model; raises an error if the model has none."""
    if model.tokenizer is None:
        raise LayersimError(
            f"`data` holds texts, but {model.name} takes `{model.main_input}` and has no tokenizer. Texts need "
            "`Data(..., tokenizer=...)`."
        )
    return model.tokenizer


def encode(texts: Sequence[Text], model: ModelInputs, longest: int | None = None) -> list[Text]:
    """Tokenise texts or pairs of texts; returns copies that hold the token ids.

    Args:
        texts: at least one.
        model: the model whose tokenizer is used.
        longest: number of tokens to which the tokenizer cuts each text; None to cut none.

    Raises:
        LayersimError: the model has no tokenizer, the tokenizer does not join pairs, or a text is missing or not Unicode.
    """
    for one in texts:
        if one.text is None:
            raise LayersimError(
                f"`data` has no text in row {one.number}. Leave such rows out: data.filter(...), table.dropna()."
            )
        for text in [one.text] if one.second is None else [one.text, one.second]:
            _refuse_unreadable(text, one.number)
    tokenizer = tokenizer_of(model)
    specials = adds_specials(tokenizer)
    sides = [[one.text for one in texts]]
    if texts[0].second is not None:
        sides.append([one.second for one in texts])
    if len(sides) > 1 and not specials:
        raise LayersimError(
            f"`column` names a pair of texts, but the tokenizer, a {type(tokenizer).__name__}, has no special token to "
            "separate them."
        )
    # This package adds BOS, once per row, so that every source reads the same tokens: TransformerLens changes the
    # tokenizers that it loads, so that they add their own.
    options: dict[str, Any] = {"add_special_tokens": specials, "verbose": False}
    if longest is not None:
        options |= {"truncation": True, "max_length": longest}
    found = tokenizer(*sides, **options)
    # Segments of 0 are the default.
    segments = found.get(SEGMENTS) if SEGMENTS in model.inputs else None
    segments = [None] * len(texts) if segments is None else [list(row) if any(row) else None for row in segments]
    return [
        _undoubled(replace(one, ids=ids, segments=own), tokenizer)
        for ids, own, one in zip(found["input_ids"], segments, texts, strict=True)
    ]


def _refuse_unreadable(text: Any, number: int) -> None:
    """Raise an error if an entry of row `number` is no string, or holds a code point that no tokenizer reads."""
    if not isinstance(text, str):
        raise LayersimError(f"`data` has {brief(text)} in row {number}; a pair must hold two texts.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LayersimError(
            f"`data` has a lone surrogate in row {number}, which no tokenizer reads: {first_line(error)}. Replace it with "
            "text.encode('utf-8', 'replace').decode()."
        ) from error


def _undoubled(text: Text, tokenizer: Any) -> Text:
    """Remove special tokens that the tokenizer added although the text had them already."""
    if not adds_specials(tokenizer):
        return text
    ids = text.ids
    first = {tokenizer.cls_token_id, tokenizer.bos_token_id}
    last = {tokenizer.sep_token_id, tokenizer.eos_token_id}
    own = len(ids) > 1 and ids[0] == ids[1] and ids[0] in first
    ended = len(ids) - own > 1 and ids[-1] == ids[-2] and ids[-1] in last
    span = slice(int(own), len(ids) - ended)
    return replace(text, ids=ids[span], own=own, segments=None if text.segments is None else text.segments[span])


@dataclass(frozen=True)
class TextRows:
    """Turns texts and chats into rows of tokens.

    Args:
        data: the data with its reading options.
        model: the model's inputs, tokenizer, context and padding ids.
        notes: counts of the pass, which are updated.
    """

    data: Data
    model: ModelInputs
    notes: Notes

    @property
    def length(self) -> int:
        """Largest number of tokens in a row."""
        return self.data.seq_len or min(DEFAULT_SEQ_LEN, self.model.context or DEFAULT_SEQ_LEN)

    @property
    def bos(self) -> list[int]:
        """The BOS that starts each row; [] if none is added."""
        bos = self.model.tokenizer.bos_token_id
        return [bos] if self.data.prepend_bos and bos is not None and not adds_specials(self.model.tokenizer) else []

    def rows(self, items: Iterator[Text | Row]) -> Iterator[Row]:
        """Yield rows of at most `seq_len` tokens, in the order of the data.

        Args:
            items: texts, chats and rows of the data.
        """
        encoded = self._encoded(items)
        if self.data.pack:
            return self.packed(encoded)
        return itertools.chain.from_iterable(self._split(x) if isinstance(x, Row) else self.windows(x) for x in encoded)

    def _encoded(self, items: Iterator[Text | Row]) -> Iterator[Text | Row]:
        """Yield the items in order, with texts and chats tokenised; rows of tokens are unchanged."""
        for kind, group in itertools.groupby(self._numbered(items), _kind):
            if kind != "chat" and (self.data.chat_template is not None or self.data.add_generation_prompt):
                name = "add_generation_prompt" if self.data.chat_template is None else "chat_template"
                raise LayersimError(f"`{name}` applies to chats only, but `data` holds texts or tokens.")
            if kind == "text":
                while some := list(itertools.islice(group, TEXTS_AT_ONCE)):
                    texts = encode([one for one in some if isinstance(one, Text)], self.model)
                    yield from map(self._one_row, texts) if self.model.reads_rows else texts
            for item in group:
                yield item if isinstance(item, Row) else self._chat(item)

    def _numbered(self, items: Iterator[Text | Row]) -> Iterator[Text | Row]:
        groups = GroupNumbers(self.data.groups)
        number = -1
        for number, item in enumerate(items):
            alone = not isinstance(item, Row) or (len(item.tokens) > 0 and not item.inputs)
            if alone and reads_decoder(self.model):
                raise decoder_alone("texts or token ids alone", self.model)
            group = groups.of(number, item.group)
            if isinstance(item, Row):
                yield replace(item, source=number, group=group)
            else:
                yield replace(item, number=number, group=group)
        groups.refuse_other_count(number + 1)

    def _split(self, row: Row) -> Iterator[Row]:
        documents = documents_in(row, self.model)
        if len(documents) > 1:
            documents = [replace(document, document=number) for number, document in enumerate(documents)]
        if len(documents) > 1 and not self.notes.packed:
            self.notes.packed = True
            LOG.warning(
                "Position ids begin again within rows of the data: each document in a row is measured as a row of its own."
            )
        return itertools.chain.from_iterable(self._windows_of(document) for document in documents)

    def _windows_of(self, row: Row) -> Iterator[Row]:
        """Split a row of tokens at `seq_len`."""
        count = len(row.tokens)
        length = self.data.seq_len or count
        parts = [row] if count <= length else [row[start : start + length] for start in range(0, count, length)]
        parts = [part for part in parts if part.attention.any()]
        if len(parts) > 1 and row.has_tokens and self.model.reads_rows:
            raise row_too_long("a row of token ids", count, length, self.model)
        return iter(parts)

    def _one_row(self, text: Text) -> Text:
        """Cut a text to one row, special tokens included; a shorter text is unchanged."""
        tokenizer = self.model.tokenizer
        # A tokenizer that cuts the beginning cuts the text's own BOS too.
        own = text.ids[:1] == self.bos and tokenizer.truncation_side == "right"
        room = self.length - (0 if own else len(self.bos))
        if len(text.ids) <= room:
            return text
        specials = tokenizer.num_special_tokens_to_add(text.second is not None) if adds_specials(tokenizer) else 0
        # Tokenizers do not cut below this length.
        if room <= specials:
            raise LayersimError(f"`seq_len` is {self.length}; it must be above {specials}, the number of special tokens.")
        # A first special token that the text brings along is doubled before `encode` takes one away.
        [cut] = encode([text], self.model, room + text.own)
        return replace(cut, cut=True)

    def _chat(self, chat: Text) -> Text:
        """Tokenise a chat. All special tokens come from its template: no BOS is added.

        Raises:
            LayersimError: there is no template, it cannot render the chat, or it does not mark the assistant's tokens.
        """
        tokenizer, messages = tokenizer_of(self.model), _text_messages(chat.messages, chat.number)
        try:
            template: str = tokenizer.get_chat_template(self.data.chat_template)
        except (AttributeError, ValueError):
            raise LayersimError(
                f"`data` holds chats, but the tokenizer of {self.model.name} has no chat template. Pass "
                "`Data(..., chat_template=...)`."
            ) from None
        given = {"chat_template": template, "add_generation_prompt": self.data.add_generation_prompt}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **given)
        # A template may raise any error.
        except Exception as error:
            raise LayersimError(
                f"`data` has a chat in row {chat.number} that the chat template cannot render: {type(error).__name__}: "
                f"{first_line(error)}."
            ) from error
        _refuse_unreadable(text, chat.number)
        if self.data.selection.rule != "assistant":
            return replace(chat, ids=tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if not GENERATION.search(template):
            raise LayersimError(
                "`positions` is 'assistant', but the chat template does not mark the assistant's tokens. Write "
                "{% generation %} and {% endgeneration %} around the assistant's messages in `chat_template`."
            )
        spans = _assistant_spans(tokenizer, messages, text, given)
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        marks = [
            any(start < stop and max(end, start + 1) > begin for begin, stop in spans)
            for start, end in encoded["offset_mapping"]
        ]
        return replace(chat, ids=encoded["input_ids"], marks=marks)

    def warn_of_cut(self) -> None:
        """Warn that texts were cut to one row."""
        if self.notes.cut:
            self.notes.once(
                f"{self.notes.cut} of {self.notes.texts} texts are longer than seq_len={self.length} tokens. The model's head "
                "makes one prediction per row, so each of them was cut to one row: pass a larger seq_len= to keep more"
                + (f", at most {self.model.context}." if self.model.context else ".")
            )

    def windows(self, text: Text) -> Iterator[Row]:
        """Split a text's tokens into rows; a long text continues in further rows, and no token is lost."""
        if text.messages is not None and self.model.reads_rows and len(text.ids) > self.length:
            raise row_too_long("a chat", len(text.ids), self.length, self.model)
        self.notes.texts += 1
        self.notes.cut += text.cut
        self.notes.own_bos += text.own
        # Rows of a chat whose template writes no BOS have none.
        adds = text.messages is None or text.ids[:1] == self.bos
        start = 0
        while start < len(text.ids):
            row, taken = self.row(text.ids[start : start + self.length], text.ids[start] in self.bos, adds)
            labels = None if text.label is None else torch.full_like(row, text.label)
            inputs, positional = dict(text.inputs), frozenset[str]()
            if text.segments is not None:
                # Tokenizers that give segments add all special tokens themselves: no BOS comes before the ids.
                inputs[SEGMENTS] = torch.tensor(text.segments[start : start + taken])
                positional = frozenset([SEGMENTS])
            marks = None
            if text.marks is not None:
                marks = torch.tensor([False] * (len(row) - taken) + text.marks[start : start + taken])
            attention = torch.ones(len(row), dtype=torch.bool)
            yield Row(
                row,
                attention,
                labels,
                source=text.number,
                group=text.group,
                start=start,
                marks=marks,
                inputs=inputs,
                positional=positional,
            )
            start += taken

    def row(self, ids: list[int], own: bool, adds: bool = True) -> tuple[Tensor, int]:
        """Build the next row of a text. Returns the row and the number of ids taken from the text.

        Args:
            ids: the next ids of the text.
            own: whether the ids begin with a BOS, so that none is added.
            adds: whether a BOS is added at all.
        """
        self.notes.own_bos += own
        bos = [] if own or not adds else self.bos
        taken = ids[: self.length - len(bos)]
        return torch.tensor(bos + taken), len(taken)

    def packed(self, items: Iterable[Text | Row]) -> Iterator[Row]:
        """Join all texts with end-of-text tokens and cut them into full rows; the last row may be shorter.

        Raises:
            LayersimError: an item is not a text, or a text has further inputs.
        """
        held: list[int] = []
        # For each id, the group of its text.
        groups: list[int] = []
        seen, last = set[int](), -1
        # For each id, whether it separates texts: an end-of-text token may be the BOS too, and does not count as one here.
        separates: list[bool] = []

        def cut(least: int) -> Iterator[Row]:
            start = 0
            while start < len(held):
                own = held[start] in self.bos and not separates[start]
                if len(held) - start < least - (0 if own else len(self.bos)):
                    break
                row, taken = self.row(held[start : start + self.length], own)
                joined = groups[start], groups[start + taken - 1]
                start += taken
                yield Row(row, torch.ones(len(row), dtype=torch.bool), joined=joined)
            del held[:start], separates[:start], groups[:start]

        for text in items:
            if isinstance(text, Row) or text.messages is not None or text.inputs or text.segments is not None:
                raise LayersimError(
                    "`pack` is True, which joins texts; `data` must hold only single texts: no token ids, chats or other "
                    "inputs."
                )
            if text.group != last and text.group in seen:
                raise LayersimError(
                    "`pack` is True, which joins texts in their order, but texts of one group of `groups` are not consecutive. "
                    "Sort the data by its groups."
                )
            last = text.group
            seen.add(last)
            ids, end = text.ids, self.model.tokenizer.eos_token_id
            if held and separates[-1] and ids[:1] == [held[-1]] and ids[0] in self.bos:
                # The separator is the BOS of this text.
                del held[-1], separates[-1], groups[-1]
            held += ids + ([end] if end is not None else [])
            separates += [False] * len(ids) + ([True] if end is not None else [])
            groups += [text.group] * (len(held) - len(groups))
            yield from cut(self.length)
        yield from cut(0)


def _kind(item: Text | Row) -> str:
    return "row" if isinstance(item, Row) else "text" if item.messages is None else "chat"


def row_too_long(kind: str, tokens: int, longest: int, model: ModelInputs) -> LayersimError:
    """The error for a row that is too long for a row classifier.

    Args:
        kind: "a chat" or "a row of token ids".
        tokens: number of tokens.
        longest: largest number of tokens in a row.
        model: the model.
    """
    return LayersimError(
        f"`data` has {kind} of {tokens} tokens, but `seq_len` is {longest}. The head of {model.name} makes one prediction per "
        "row, so rows are not split."
    )


def _assistant_spans(
    tokenizer: Any, messages: list[dict[str, Any]], text: str, given: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """Start and exclusive end of each span of characters that the template marks as the assistant's.

    `return_assistant_tokens_mask=True` maps these characters to tokens one by one: where a part begins or ends with a character
    without a token, as spaces are to some tokenizers, its mask ends too early or too late.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, spans = render_jinja_template(
        [messages], return_assistant_tokens_mask=True, **given, **tokenizer.special_tokens_map
    )
    if rendered[0] != text:
        raise LayersimError(
            "The chat template renders a different text when it marks the assistant's tokens; the texts must be equal."
        )
    return [(int(start), int(stop)) for start, stop in spans[0]]


def _text_messages(messages: Any, number: int) -> list[dict[str, Any]]:
    """Remove empty fields from the messages of a chat. Raises an error for content other than text."""
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise LayersimError(
            f"`data` in row {number} is {None if messages == () else brief(messages)}; it must be a chat, a list of messages "
            "with role and content."
        )
    found = [{name: value for name, value in message.items() if value is not None} for message in messages]
    for message in found:
        parts = message.get("content")
        kinds = {part.get("type", "text") for part in parts if isinstance(part, Mapping)} if isinstance(parts, list) else set()
        if kinds - {"text"}:
            raise LayersimError(
                f"`data` has a chat in row {number} with content of type {', '.join(sorted(kinds - {'text'}))}; only text is "
                f"read. To measure other content, run the model yourself: {ATTACH}model(...)."
            )
        # A template writes nothing for a key that it does not know.
        if "role" not in message or not message.keys() & {"content", "tool_calls"}:
            raise LayersimError(
                f"`data` has a chat in row {number} with a message whose keys are {', '.join(message) or 'none'}; a message "
                "has role and content."
            )
    return found
