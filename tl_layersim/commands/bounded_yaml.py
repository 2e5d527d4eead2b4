"""A reader of YAML files whose size, depth and number of values are bounded. Every value is a text, a list or a dict.

A file of options may be another person's. YAML lets a few hundred bytes stand for billions of values (aliases), and its usual
loaders call themselves for each level of nesting. This reader therefore follows PyYAML's events, which come one by one, and
stops at the first one that a file of options does not need.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import LayersimError, excerpt
from ..core.wording import brief, first_line

LARGEST_FILE = 256_000
MOST_VALUES = 10_000
DEEPEST = 4
# Control characters that a text may hold.
ALLOWED_CONTROLS = "\t\n"


class MalformedYaml(ValueError):
    """The content of a file is not the YAML that this module reads; the message is the end of a sentence about the file."""


def read_bounded_yaml(path: Path, argument: str) -> Any:
    """Read a YAML file of texts, lists and mappings.

    Args:
        path: path of the file.
        argument: the argument that names the file, as messages write it, such as "--config".

    Raises:
        LayersimError: the file cannot be read, is too large or too deep, or holds an alias, a tag, a repeated key, a key that
            is no text, or several documents.
    """
    import yaml

    try:
        text = _text_of(path)
        return _Tree(yaml.parse(text, Loader=yaml.BaseLoader)).document()
    except MalformedYaml as error:
        reason = str(error)
    except UnicodeDecodeError as error:
        reason = f"is not a text in UTF-8: {error.reason}"
    except yaml.YAMLError as error:
        reason = f"cannot be read as YAML: {excerpt(' '.join(str(error).split()), 200)}"
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {first_line(error)}"
    raise LayersimError(f"`{argument}` is {path}, which {reason}.")


def _text_of(path: Path) -> str:
    """The text of a file of at most `LARGEST_FILE` bytes. A device or a pipe, which may have no end, is not opened."""
    if path.exists() and not path.is_file():
        raise MalformedYaml("is not a file")
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise MalformedYaml(f"is too large for a file of options; it must have at most {LARGEST_FILE:,} bytes")
    return content.decode("utf-8")


class _Tree:
    """The values that PyYAML's events describe.

    Args:
        events: PyYAML's events.
    """

    def __init__(self, events: Iterator[Any]) -> None:
        self._events = events
        self._values = 0

    def document(self) -> Any:
        """The only document; None if there is none."""
        import yaml

        documents: list[Any] = []
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if documents:
                    raise MalformedYaml("holds several documents; it must hold one")
                documents.append(self._value(next(self._events), 1))
        return documents[0] if documents else None

    def _value(self, event: Any, depth: int) -> Any:
        import yaml

        self._values += 1
        if self._values > MOST_VALUES:
            raise MalformedYaml(f"holds too many values; it must hold at most {MOST_VALUES:,}")
        if depth > DEEPEST:
            raise MalformedYaml("is nested too deeply for a file of options")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise MalformedYaml(f"holds the anchor or alias {brief(event.anchor)}; each value must be written out")
        if event.tag is not None:
            raise MalformedYaml(f"holds the tag {brief(event.tag)}; values have no tags")
        if isinstance(event, yaml.ScalarEvent):
            return _checked_text(event.value)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._list(depth)
        return self._dict(depth)

    def _list(self, depth: int) -> list[Any]:
        import yaml

        values: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._value(event, depth + 1))
        return values

    def _dict(self, depth: int) -> dict[str, Any]:
        import yaml

        entries: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                raise MalformedYaml(f"has {brief(key)} as a key; a key must be a text")
            if key in entries:
                raise MalformedYaml(f"has the key {brief(key)} twice")
            entries[key] = self._value(next(self._events), depth + 1)
        return entries


def _checked_text(text: str) -> str:
    """The text, unless it holds a control character or half a surrogate pair, which no option needs."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in ALLOWED_CONTROLS:
            raise MalformedYaml(f"holds the control character {character!r} in a value")
    return text
