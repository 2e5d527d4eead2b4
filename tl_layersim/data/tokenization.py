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
from .input_names import decoder_alone, reads_decoder
from .packed_documents import documents_in
from .row import ModelInputs, Row
from .texts import GroupNumbers
from .value_kinds import as_plain, innermost

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
        starts_with_special: whether the text itself begins with a special token, so that no BOS is added.
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
    starts_with_special: bool = False
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
        fields_of_messages = zip(*value.values(), strict=True)
        return [dict(zip(value, fields, strict=True)) for fields in fields_of_messages]
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
    for item in texts:
        if item.text is None:
            raise LayersimError(
                f"`data` has no text in row {item.number}. Leave such rows out: data.filter(...), table.dropna()."
            )
        _refuse_unreadable(item.text, item.number)
        if item.second is not None:
            _refuse_unreadable(item.second, item.number)
    tokenizer = tokenizer_of(model)
    specials = adds_specials(tokenizer)
    sides = [[item.text for item in texts]]
    if texts[0].second is not None:
        sides.append([item.second for item in texts])
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
    encoded = tokenizer(*sides, **options)
    segments_of_texts: list[list[int] | None] = [None] * len(texts)
    if SEGMENTS in model.inputs and encoded.get(SEGMENTS) is not None:
        # Segments of 0 are the default.
        segments_of_texts = [list(segments) if any(segments) else None for segments in encoded[SEGMENTS]]
    tokenised = []
    for item, ids, segments in zip(texts, encoded["input_ids"], segments_of_texts, strict=True):
        tokenised.append(_without_doubled_specials(replace(item, ids=ids, segments=segments), tokenizer))
    return tokenised


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


def _without_doubled_specials(text: Text, tokenizer: Any) -> Text:
    """Remove special tokens that the tokenizer added although the text had them already."""
    if not adds_specials(tokenizer):
        return text
    ids = text.ids
    start = 0
    end = len(ids)
    if len(ids) > 1 and ids[0] == ids[1] and ids[0] in {tokenizer.cls_token_id, tokenizer.bos_token_id}:
        start = 1
    # At least two ids must be left, so that a special token is not removed from both ends.
    if end - start > 1 and ids[-1] == ids[-2] and ids[-1] in {tokenizer.sep_token_id, tokenizer.eos_token_id}:
        end -= 1
    return replace(
        text,
        ids=ids[start:end],
        starts_with_special=start == 1,
        segments=None if text.segments is None else text.segments[start:end],
    )


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
        if bos is None or not self.data.prepend_bos or adds_specials(self.model.tokenizer):
            return []
        return [bos]

    def rows(self, items: Iterator[Text | Row]) -> Iterator[Row]:
        """Yield rows of at most `seq_len` tokens, in the order of the data.

        Args:
            items: texts, chats and rows of the data.
        """
        encoded = self._encoded(items)
        if self.data.pack:
            return self.packed(encoded)
        rows_of_items = (self._split(item) if isinstance(item, Row) else self.windows(item) for item in encoded)
        return itertools.chain.from_iterable(rows_of_items)

    def _encoded(self, items: Iterator[Text | Row]) -> Iterator[Text | Row]:
        """Yield the items in order, with texts and chats tokenised; rows of tokens are unchanged."""
        for kind, group in itertools.groupby(self._numbered(items), _kind_of_item):
            if kind != "chat" and (self.data.chat_template is not None or self.data.add_generation_prompt):
                name = "add_generation_prompt" if self.data.chat_template is None else "chat_template"
                raise LayersimError(f"`{name}` applies to chats only, but `data` holds texts or tokens.")
            if kind == "text":
                while items_at_once := list(itertools.islice(group, TEXTS_AT_ONCE)):
                    texts = encode([item for item in items_at_once if isinstance(item, Text)], self.model)
                    yield from map(self._one_row, texts) if self.model.reads_rows else texts
            # A group of texts is used up here.
            for item in group:
                yield item if isinstance(item, Row) else self._chat(item)

    def _numbered(self, items: Iterator[Text | Row]) -> Iterator[Text | Row]:
        groups = GroupNumbers(self.data.groups)
        number = -1
        for number, item in enumerate(items):
            has_one_stack = not isinstance(item, Row) or (len(item.tokens) > 0 and not item.inputs)
            if has_one_stack and reads_decoder(self.model):
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
        parts = [row]
        if count > length:
            parts = [row[start : start + length] for start in range(0, count, length)]
        parts = [part for part in parts if part.attention.any()]
        if len(parts) > 1 and row.has_tokens and self.model.reads_rows:
            raise row_too_long("a row of token ids", count, length, self.model)
        return iter(parts)

    def _one_row(self, text: Text) -> Text:
        """Cut a text to one row, special tokens included; a shorter text is unchanged."""
        tokenizer = self.model.tokenizer
        # A tokenizer that cuts the beginning cuts the text's own BOS too.
        keeps_its_bos = text.ids[:1] == self.bos and tokenizer.truncation_side == "right"
        room = self.length if keeps_its_bos else self.length - len(self.bos)
        if len(text.ids) <= room:
            return text
        specials = tokenizer.num_special_tokens_to_add(text.second is not None) if adds_specials(tokenizer) else 0
        # Tokenizers do not cut below this length.
        if room <= specials:
            raise LayersimError(f"`seq_len` is {self.length}; it must be above {specials}, the number of special tokens.")
        # A first special token that the text brings along is doubled before `encode` takes one away.
        [cut] = encode([text], self.model, room + text.starts_with_special)
        return replace(cut, cut=True)

    def _chat(self, chat: Text) -> Text:
        """Tokenise a chat. All special tokens come from its template: no BOS is added.

        Raises:
            LayersimError: there is no template, it cannot render the chat, or it does not mark the assistant's tokens.
        """
        tokenizer = tokenizer_of(self.model)
        messages = _text_messages(chat.messages, chat.number)
        try:
            template: str = tokenizer.get_chat_template(self.data.chat_template)
        except (AttributeError, ValueError):
            raise LayersimError(
                f"`data` holds chats, but the tokenizer of {self.model.name} has no chat template. Pass "
                "`Data(..., chat_template=...)`."
            ) from None
        options = {"chat_template": template, "add_generation_prompt": self.data.add_generation_prompt}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
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
        spans = _assistant_spans(tokenizer, messages, text, options)
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
        marks = [_overlaps(start, end, spans) for start, end in encoded["offset_mapping"]]
        return replace(chat, ids=encoded["input_ids"], marks=marks)

    def warn_of_cut(self) -> None:
        """Warn that texts were cut to one row."""
        if self.notes.cut:
            limit = f", at most {self.model.context}" if self.model.context else ""
            self.notes.once(
                f"{self.notes.cut} of {self.notes.texts} texts are longer than seq_len={self.length} tokens. The model's head "
                f"makes one prediction per row, so each of them was cut to one row: pass a larger seq_len= to keep more{limit}."
            )

    def windows(self, text: Text) -> Iterator[Row]:
        """Split a text's tokens into rows; a long text continues in further rows, and no token is lost."""
        if text.messages is not None and self.model.reads_rows and len(text.ids) > self.length:
            raise row_too_long("a chat", len(text.ids), self.length, self.model)
        self.notes.texts += 1
        self.notes.cut += text.cut
        self.notes.own_bos += text.starts_with_special
        # Rows of a chat whose template writes no BOS have none.
        adds_bos = text.messages is None or text.ids[:1] == self.bos
        start = 0
        while start < len(text.ids):
            tokens, used = self.row(text.ids[start : start + self.length], text.ids[start] in self.bos, adds_bos)
            labels = None if text.label is None else torch.full_like(tokens, text.label)
            inputs = dict(text.inputs)
            positional = frozenset[str]()
            if text.segments is not None:
                # Tokenizers that give segments add all special tokens themselves: no BOS comes before the ids.
                inputs[SEGMENTS] = torch.tensor(text.segments[start : start + used])
                positional = frozenset([SEGMENTS])
            marks = None
            if text.marks is not None:
                added = len(tokens) - used
                marks = torch.tensor([False] * added + text.marks[start : start + used])
            yield Row(
                tokens,
                torch.ones(len(tokens), dtype=torch.bool),
                labels,
                source=text.number,
                group=text.group,
                start=start,
                marks=marks,
                inputs=inputs,
                positional=positional,
            )
            start += used

    def row(self, ids: list[int], has_bos: bool, adds_bos: bool = True) -> tuple[Tensor, int]:
        """Build the next row of a text. Returns the tokens of the row and the number of ids used of the text.

        Args:
            ids: the next ids of the text.
            has_bos: whether the ids begin with a BOS, so that none is added.
            adds_bos: whether a BOS is added at all.
        """
        self.notes.own_bos += has_bos
        bos = self.bos if adds_bos and not has_bos else []
        ids_of_row = ids[: self.length - len(bos)]
        return torch.tensor(bos + ids_of_row), len(ids_of_row)

    def packed(self, items: Iterable[Text | Row]) -> Iterator[Row]:
        """Join all texts with end-of-text tokens and cut them into full rows; the last row may be shorter.

        Raises:
            LayersimError: an item is not a text, or a text has further inputs.
        """
        # The ids that are not in a row yet.
        ids: list[int] = []
        # For each id, the group of its text.
        groups: list[int] = []
        # For each id, whether it separates texts: an end-of-text token may be the BOS too, and does not count as one here.
        separates: list[bool] = []
        earlier_groups = set[int]()
        last_group = -1

        def cut_rows(least: int) -> Iterator[Row]:
            """Yield rows of the ids while at least `least` tokens are left, BOS included, and remove these ids."""
            start = 0
            while start < len(ids):
                has_bos = ids[start] in self.bos and not separates[start]
                remaining = len(ids) - start
                if not has_bos:
                    remaining += len(self.bos)
                if remaining < least:
                    break
                tokens, used = self.row(ids[start : start + self.length], has_bos)
                joined = (groups[start], groups[start + used - 1])
                start += used
                yield Row(tokens, torch.ones(len(tokens), dtype=torch.bool), joined=joined)
            del ids[:start], separates[:start], groups[:start]

        for text in items:
            if isinstance(text, Row) or text.messages is not None or text.inputs or text.segments is not None:
                raise LayersimError(
                    "`pack` is True, which joins texts; `data` must hold only single texts: no token ids, chats or other "
                    "inputs."
                )
            if text.group != last_group and text.group in earlier_groups:
                raise LayersimError(
                    "`pack` is True, which joins texts in their order, but texts of one group of `groups` are not consecutive. "
                    "Sort the data by its groups."
                )
            last_group = text.group
            earlier_groups.add(text.group)
            if ids and separates[-1] and text.ids[:1] == [ids[-1]] and text.ids[0] in self.bos:
                # The separator is the BOS of this text.
                del ids[-1], separates[-1], groups[-1]
            ids += text.ids
            separates += [False] * len(text.ids)
            end_of_text = self.model.tokenizer.eos_token_id
            if end_of_text is not None:
                ids.append(end_of_text)
                separates.append(True)
            groups += [text.group] * (len(ids) - len(groups))
            yield from cut_rows(self.length)
        yield from cut_rows(0)


def _overlaps(start: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a token has characters in one of the spans. A token without characters stands for the one at its start.

    Args:
        start: the token's first character.
        end: its exclusive end.
        spans: first character and exclusive end of each span.
    """
    end = max(end, start + 1)
    return any(start < span_end and end > span_start for span_start, span_end in spans)


def _kind_of_item(item: Text | Row) -> str:
    if isinstance(item, Row):
        return "row"
    return "text" if item.messages is None else "chat"


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
    tokenizer: Any, messages: list[dict[str, Any]], text: str, options: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """Start and exclusive end of each span of characters that the template marks as the assistant's.

    `return_assistant_tokens_mask=True` maps these characters to tokens one by one: where a part begins or ends with a character
    without a token, as spaces are to some tokenizers, its mask ends too early or too late.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, spans = render_jinja_template(
        [messages], return_assistant_tokens_mask=True, **options, **tokenizer.special_tokens_map
    )
    if rendered[0] != text:
        raise LayersimError(
            "The chat template renders a different text when it marks the assistant's tokens; the texts must be equal."
        )
    return [(int(start), int(stop)) for start, stop in spans[0]]


def _text_messages(messages: Any, number: int) -> list[dict[str, Any]]:
    """Remove empty fields from the messages of a chat. Raises an error for content other than text."""
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        # `chats_in` returns () for a chat of None.
        value = None if messages == () else brief(messages)
        raise LayersimError(f"`data` in row {number} is {value}; it must be a chat, a list of messages with role and content.")
    texts = []
    for message in messages:
        fields = {name: value for name, value in message.items() if value is not None}
        content = fields.get("content")
        kinds: set[str] = set()
        if isinstance(content, list):
            kinds = {part.get("type", "text") for part in content if isinstance(part, Mapping)}
        if kinds - {"text"}:
            raise LayersimError(
                f"`data` has a chat in row {number} with content of type {', '.join(sorted(kinds - {'text'}))}; only text is "
                f"read. To measure other content, run the model yourself: with lsim.attach(model, analyzers) as probe: "
                "model(...)."
            )
        # A template writes nothing for a key that it does not know.
        if "role" not in fields or not fields.keys() & {"content", "tool_calls"}:
            raise LayersimError(
                f"`data` has a chat in row {number} with a message whose keys are {', '.join(fields) or 'none'}; a message "
                "has role and content."
            )
        texts.append(fields)
    return texts
