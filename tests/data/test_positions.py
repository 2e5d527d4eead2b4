"""The rule that selects counted positions: what each rule selects, what is refused, and what is recorded."""

from __future__ import annotations

import functools

import datasets
import pandas
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.data import Data
from tl_layersim.data.positions import Positions, as_rule

from ..models.tiny_models import name_of_rule
from .helpers import ROWS, TEXTS, batches, counted

TOKENS = torch.tensor([10, 11, 12, 13, 14, 15])
PADDED = torch.tensor([0, 1, 1, 1, 1, 0], dtype=torch.bool)
RULES = [
    ("all", [11, 12, 13, 14]),
    ("first", [11]),
    ("last", [14]),
    ("mean", [11, 12, 13, 14]),
    (slice(1, 3), [12, 13]),
    (slice(-2, None), [13, 14]),
    (slice(None, None, 2), [11, 13]),
    (slice(-1, None, -2), [12, 14]),
    (slice(9, 12), []),
    ("padded", [10, 11, 12, 13, 14, 15]),
]


@pytest.mark.parametrize(("rule", "expected"), RULES, ids=name_of_rule)
def test_a_rule_refers_to_the_attended_positions(rule, expected):
    assert TOKENS[Positions(rule).select(TOKENS, PADDED)].tolist() == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("all", [13, 14]),
        ("first", [13]),
        ("last", [14]),
        (slice(0, 1), [13]),
        (slice(-3, None), [13, 14]),
        # What a function selects of the whole row, without the first positions.
        (lambda tokens: tokens >= 12, [13, 14]),
        (lambda tokens: [0, 1, 2], [13]),
        ("padded", [12, 13, 14, 15]),
    ],
)
def test_skip_first_acts_before_the_rule(rule, expected):
    assert TOKENS[Positions(rule, skip_first=2).select(TOKENS, PADDED)].tolist() == expected


def test_a_row_shorter_than_skip_first_has_no_position():
    for rule in ("all", "first", "last", slice(0, 3), lambda tokens: tokens > 0):
        assert not Positions(rule, skip_first=4).select(TOKENS, PADDED).any()


@pytest.mark.parametrize(
    "function",
    [
        lambda tokens: tokens % 2 == 0,
        lambda tokens: (tokens % 2 == 0).nonzero()[:, 0],
        lambda tokens: (tokens % 2 == 0).tolist(),
        lambda tokens: [1, -1],
        lambda tokens: (tokens % 2 == 0).numpy(),
    ],
)
def test_a_function_returns_a_mask_or_indices_of_the_row_without_padding(function):
    assert TOKENS[Positions(function).select(TOKENS, PADDED)].tolist() == [12, 14]


def test_a_function_sees_the_ids_alone_and_cannot_change_them():
    seen = []

    def note(tokens):
        seen.append(tokens.tolist())
        tokens.zero_()
        return []

    assert not Positions(note).select(TOKENS, PADDED).any()
    assert (seen, TOKENS.tolist()) == ([[11, 12, 13, 14]], [10, 11, 12, 13, 14, 15])


@pytest.mark.parametrize(
    "returned",
    [
        torch.ones(5, dtype=torch.bool),
        torch.ones(4, 1, dtype=torch.bool),
        torch.tensor(True),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([4]),
        [-5],
        [0.5, 1.0],
        None,
        "last",
        [[0], [1, 2]],
    ],
    ids=name_of_rule,
)
def test_what_is_neither_mask_nor_indices_is_refused(returned):
    with pytest.raises(lsim.LayersimError, match=r"`positions` returned .* 4 tokens.*-4 to 3"):
        Positions(lambda tokens: returned).select(TOKENS, PADDED)


@pytest.mark.parametrize("rule", [3, [0, -1]])
def test_what_is_no_rule_is_refused_before_data_is_read(rule):
    with pytest.raises(lsim.LayersimError, match=r"^`positions`"):
        Data([], positions=rule)


def at_comma(tokens):
    return tokens == 11


def at_dot(tokens):
    return tokens == 12


class Every:
    def __init__(self, step):
        self.step = step

    def __call__(self, tokens):
        return torch.arange(0, len(tokens), self.step)


def of(token):
    return lambda tokens: tokens == token


def test_the_record_tells_one_rule_from_another():
    def record(rule):
        return Data([], positions=rule).record()["positions"]

    assert [record(rule) for rule in (None, "last", slice(1, None), slice(None, -1, 2), "my_mask")] == [
        "all", "last", "1:", ":-1:2", "my_mask",
    ]  # fmt: skip
    assert record(at_comma).startswith(f"{__name__}.at_comma sha256 ")
    assert record(at_comma) == record(at_comma)
    parted = [functools.partial(torch.eq, other=token) for token in (3, 4)]
    rules = [at_comma, at_dot, of(3), of(4), of(torch.tensor(5)), lambda t: t == 3, Every(2), Every(3), *parted, torch.nonzero]
    assert len({record(rule) for rule in rules}) == len(rules)
    assert (record(of(3)), record(Every(2))) == (record(of(3)), record(Every(2)))


def test_rules_as_text():
    assert [as_rule(text) for text in (None, "last", "2:-1", ":5", "::2", ":", "a:b")] == [
        None, "last", slice(2, -1), slice(None, 5), slice(None, None, 2), slice(None, None), "a:b",
    ]  # fmt: skip


def test_rows_of_texts_are_counted_by_the_rule():
    assert counted(TEXTS, positions="last") == [[row[-1]] for row in ROWS]
    assert counted(TEXTS, positions=slice(1, 3)) == [row[1:3] for row in ROWS]
    assert counted(TEXTS, positions="first", skip_first=3) == [[5], [], [10]]
    assert all(batch.pooled for batch in batches(TEXTS, positions="mean"))
    assert not any(batch.pooled for batch in batches(TEXTS, positions="last"))


def test_a_rule_refers_to_rows_that_the_model_reads():
    """A long text is several rows, each with a last position; so are rows of packed texts and split rows of tokens."""
    long = "w3 w4 w5 w6 w7 w8 w9"
    assert counted([long], seq_len=4, positions="last") == [[5], [8], [9]]
    assert counted([[3, 4, 5, 6, 7]], seq_len=2, positions="last") == [[4], [6], [7]]
    assert counted([long, long], seq_len=8, pack=True, positions=slice(0, 2)) == [[1, 3], [1, 2], [1, 9]]


def test_max_tokens_counts_counted_positions_and_leaves_rows_whole():
    rows = [[3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14]]
    assert counted(rows, positions="last", max_tokens=2) == [[6], [9]]
    assert counted(rows, positions=slice(-2, None), max_tokens=3) == [[5, 6], [8]]
    [first, second] = batches(rows, positions="first", max_tokens=3)
    # The last row runs whole: cut to its first token, the first token of a bidirectional model would be another one.
    assert (first.attention.sum(1).tolist(), second.attention.sum(1).tolist()) == ([4, 3], [5])
    # A mean over a part of a row would be of another kind than the others.
    assert counted(rows, positions="mean", max_tokens=5) == [[3, 4, 5, 6], [7, 8, 9]]
    assert counted(rows, positions="all", max_tokens=5) == [[3, 4, 5, 6], [7]]


MARKED = {
    "tensors": {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]), "own": torch.tensor([[0, 1, 0], [1, 0, 1]])},
    "bools": {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 8]]), "own": torch.tensor([[0, 1, 0], [1, 0, 1]]).bool()},
    "rows of tensors": [
        {"input_ids": torch.tensor([3, 4, 5]), "own": torch.tensor([0, 1, 0])},
        {"input_ids": torch.tensor([6, 7, 8]), "own": torch.tensor([1, 0, 1])},
    ],
    "a data set": datasets.Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7, 8]], "own": [[0, 1, 0], [1, 0, 1]]}),
    "a table": pandas.DataFrame({"input_ids": [[3, 4, 5], [6, 7, 8]], "own": [[0, 1, 0], [1, 0, 1]]}),
    "padded": {
        "input_ids": torch.tensor([[2, 3, 4, 5], [6, 7, 8, 2]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
        # A mark on padding is none.
        "own": torch.tensor([[1, 0, 1, 0], [1, 0, 1, 1]]),
    },
}


@pytest.mark.parametrize("kind", MARKED)
def test_a_mask_column_of_the_data_counts(kind):
    assert counted(MARKED[kind], positions="own") == [[4], [6, 8]]
    assert counted(MARKED[kind], positions="own", skip_first=1) == [[4], [8]]


def test_a_mask_column_of_ragged_rows_is_cut_along():
    data = {"input_ids": [[3, 4, 5], [6, 7]], "own": [[0, 1, 1], [1, 0]]}
    assert counted(data, positions="own") == [[4, 5], [6]]
    assert counted(data, positions="own", seq_len=2) == [[4], [5], [6]]


@pytest.mark.parametrize(
    ("data", "rule", "says"),
    [
        (TEXTS, "own", "`positions` is 'own'"),
        (TEXTS, "frist", r"`positions` is 'frist'.*'first'.* 2:10 "),
        ({"input_ids": [[3, 4]]}, "own", "`positions` is 'own'"),
        ({"input_ids": [[3, 4]], "own": [[1, 2]]}, "own", "`own`.* 1 to 2"),
        ({"input_ids": [[3, 4]], "own": [[1, 0, 1]]}, "own", r"`own`.*\(3,\).* 2 "),
        ({"input_ids": [[3, 4]], "own": [1]}, "own", r"`own`.*\(\).* 2 "),
        ({"input_ids": [[3, 4], [5]], "own": [[1, 0]]}, "own", r"`own`.* 1 .* 2\b"),
        ({"input_ids": [[3, 4]], "own": [["a", "b"]]}, "own", "`own`"),
        ([[3, 4]], "assistant", "`positions` is 'assistant'"),
    ],
)
def test_a_column_that_marks_nothing_is_refused(data, rule, says):
    with pytest.raises(lsim.LayersimError, match=says):
        batches(data, positions=rule)
