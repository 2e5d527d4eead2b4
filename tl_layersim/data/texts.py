"""Texts as units: which rows of the data belong to one text.

Rows that are cut from one text, and rows of one group, depend on each other. Statistics therefore count texts: pairs of rows of
one text are left out, permutations exchange whole texts, and a jackknife block never ends inside a text.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError, in_words
from ..core.wording import brief
from .labels import is_missing
from .row import Row, TextOfRow

# Distinct texts of which HSIC without pairs of one text is defined. Rows of data with fewer texts are its units.
LEAST_TEXTS = 4
# Largest memory of rows whose groups are not consecutive, and which are therefore held until all are read.
MOST_HELD = 256_000_000


def groups_as_list(groups: Any) -> list[Any] | None:
    """The option `groups` as a list with one value for each row of the data; None for no groups, and for a column.

    Args:
        groups: the option of `Data`.

    Raises:
        LayersimError: the groups are not a sequence with one value for each row.
    """
    if groups is None or isinstance(groups, str):
        return None
    values = groups.tolist() if isinstance(groups, Tensor | np.ndarray) or hasattr(groups, "to_numpy") else groups
    if isinstance(values, list | tuple | range):
        return list(values)
    raise LayersimError(
        f"`groups` is {brief(groups)}; it must be the name of a column, or a sequence with one value for each row."
    )


def _is_hashable(value: Any) -> bool:
    """Whether equal values have equal hashes, unlike tensors and objects whose class defines no equality."""
    if isinstance(value, tuple):
        return all(map(_is_hashable, value))
    if isinstance(value, Tensor) or getattr(type(value), "__hash__", None) is object.__hash__:
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


class GroupNumbers:
    """Gives each row of the data the number of its group: the index of the group's first row.

    Args:
        groups: the option of `Data`: a sequence with one value for each row, the name of a column, or None.

    Examples:
        >>> groups = GroupNumbers(["a", "b", "a"])
        >>> [groups.of(number, None) for number in range(3)]
        [0, 1, 0]
    """

    def __init__(self, groups: Any) -> None:
        self._column = groups if isinstance(groups, str) else None
        self._values = groups_as_list(groups)
        self._first: dict[Hashable, int] = {}

    def of(self, number: int, value: Any) -> int:
        """The number of a row's group.

        Args:
            number: index of the row in the data.
            value: the group's value, if the groups are a column.

        Raises:
            LayersimError: the row has no group, or the value is not hashable.
        """
        if self._values is not None:
            if number >= len(self._values):
                raise LayersimError(
                    f"`groups` has {len(self._values)} values; it must have one for each row of the data, which has more rows."
                )
            value = self._values[number]
        elif self._column is None:
            return number
        if isinstance(value, Tensor | np.generic) and getattr(value, "ndim", 1) == 0:
            value = value.item()
        # Data sets return tuples as lists.
        if isinstance(value, list):
            value = tuple(value)
        if is_missing(value) or not _is_hashable(value):
            raise LayersimError(
                f"`groups` is {brief(value)} in row {number}; each row must have a group: a number, a text or another hashable "
                "value."
            )
        return self._first.setdefault(value, number)

    def refuse_other_count(self, rows: int) -> None:
        """Raise an error if the groups have more values than the data has rows."""
        if self._values is not None and len(self._values) != rows:
            raise LayersimError(
                f"`groups` has {len(self._values)} values; it must have one for each of the {rows} rows of the data."
            )


def in_texts(rows: Iterable[Row], grouped: bool, packed: bool) -> Iterator[Row]:
    """Yields the rows of each text together, with the text that each belongs to.

    A row that joins several texts is a unit of its own unless it lies within the text in which the row before it ends.
    Consecutive units then share a text. A document that position ids tell apart in a row is a unit, unless the user named the
    group of its row; the first document of a row may be the rest of the last one before it. If the data has fewer than
    `LEAST_TEXTS` texts, and more rows, its rows are the units.

    Args:
        rows: rows of the data, in order, with their groups.
        grouped: whether the user named groups. Few groups are then no reason to take rows as units.
        packed: whether rows join texts.
    """
    # Texts of a group are together before they are packed.
    rows = _group_by_group(iter(rows)) if grouped and not packed else iter(rows)
    numbered = _numbered(rows, grouped)
    first_rows: list[Row] = []
    texts = 0
    for row in numbered:
        assert row.text is not None
        first_rows.append(row)
        texts = row.text.unit + 1
        if grouped or texts >= LEAST_TEXTS:
            break
    else:
        # The data is at its end, and has too few texts.
        if texts < len(first_rows):
            first_rows = [_with_own_unit(row, number) for number, row in enumerate(first_rows)]
    yield from itertools.chain(first_rows, numbered)


def _with_own_unit(row: Row, number: int) -> Row:
    assert row.text is not None
    return replace(row, text=row.text._replace(unit=number, part=0, neighbours=True))


def _numbered(rows: Iterator[Row], grouped: bool) -> Iterator[Row]:
    """Number the units of rows of which those of one text are together.

    Args:
        rows: the rows.
        grouped: whether the user named groups, which then hold all documents of their rows.
    """
    unit = -1
    part = 0
    # Group and document in which the row before ends.
    end_of_last_row: tuple[int, int | None] | None = None
    for row in rows:
        joined = row.joined or (row.group, row.group)
        first_group, last_group = joined
        document = None if grouped else row.document
        if first_group == last_group and end_of_last_row == (first_group, document):
            part += 1
        else:
            unit += 1
            part = 0
        group = -1 if row.joined else row.group
        neighbours = row.joined is not None or document is not None
        yield replace(row, text=TextOfRow(group, unit, part, joined, neighbours))
        end_of_last_row = (last_group, document)


def _group_by_group(rows: Iterator[Row]) -> Iterator[Row]:
    """Yields the rows group by group, in the order of each group's first row.

    All rows are held until the last is read, because any row may belong to the first group. Rows that take more than
    `MOST_HELD` bytes are passed on as they come.

    Raises:
        LayersimError: rows of a group are apart, and the rows take too much memory.
    """
    rows_of_groups: dict[int, list[Row]] = {}
    size = 0
    last_group = -1
    is_sorted = True
    for row in rows:
        if row.group != last_group and row.group in rows_of_groups:
            is_sorted = False
        rows_of_groups.setdefault(row.group, []).append(row)
        size += row.nbytes
        last_group = row.group
        if size <= MOST_HELD:
            continue
        if not is_sorted:
            raise LayersimError(
                f"`groups` has rows of one group that are not consecutive, and the rows take more than {in_words(MOST_HELD)}. "
                "Sort the data by its groups."
            )
        # The groups stay as keys without rows, so that a row which comes back to one of them is noticed.
        for rows_of_group in rows_of_groups.values():
            yield from rows_of_group
            rows_of_group.clear()
    for rows_of_group in rows_of_groups.values():
        yield from rows_of_group


def split_rows(texts: Sequence[TextOfRow], held_out: int) -> tuple[int, int]:
    """Where to cut rows into a part for a fit and a later part for its evaluation that have no text in common.

    A text across the cut belongs to the fit if another text follows, else to the evaluation. A row that would belong to both
    parts is in neither.

    Args:
        texts: the text of each row, in the order of the data.
        held_out: number of rows that the evaluation should have.

    Returns:
        Number of rows of the fit, and index of the first row of the evaluation. The former is 0 if all rows are of one text.

    Examples:
        Texts of 2, 3 and 1 rows, of which about two rows are for the evaluation.

        >>> texts = [TextOfRow(group, 0, 0, (group, group)) for group in (0, 0, 2, 2, 2, 5)]
        >>> split_rows(texts, 2)
        (5, 5)
    """
    # The texts in which each row begins and ends, in ascending order.
    first = torch.tensor([text.joined[0] for text in texts])
    last = torch.tensor([text.joined[1] for text in texts])
    cut = len(texts) - held_out
    rows_of_later_texts = (first[cut:] > last[max(cut - 1, 0)]).nonzero()[:, 0]
    if len(rows_of_later_texts):
        start_of_evaluation = cut + int(rows_of_later_texts[0])
    else:
        # No text begins after the cut: the evaluation gets the last text.
        start_of_evaluation = min(int((first < last[-1]).sum()), len(first) - 1)
    end_of_fit = int((last < first[start_of_evaluation]).sum())
    return end_of_fit, start_of_evaluation
