"""The text is the unit: rows of one text are never compared, exchanged or divided, whoever cut them."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..models.tiny_models import hidden_states, random_tokens, tiny_llama, tiny_tokenizer

few_texts = pytest.mark.filterwarnings("ignore:LinearPredictivity is evaluated on")
ROWS = 24
LENGTH = 5
# Rows of seven texts, of unequal numbers of rows, which are not together in the data.
GROUPS = [0, 1, 0, 2, 3, 3, 4, 0, 5, 6, 2, 6, 1, 4, 5, 5, 5, 0, 6, 1, 2, 3, 4, 4]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def tokens():
    rows = random_tokens(ROWS, LENGTH)
    # Equal first tokens have equal states at all layers.
    rows[:, 0] = torch.arange(3, 3 + ROWS)
    return rows


@pytest.fixture(scope="module")
def states(model, tokens):
    return np.concatenate([hidden_states(model, row) for row in tokens], axis=1)


def measured(model, data, analyzer, **options):
    return lsim.analyze(model, data, [analyzer], **options)[analyzer.name]


TEXT_OF_TOKEN = np.repeat(GROUPS, LENGTH)
# All tokens in one minibatch.
ALL = ROWS * LENGTH
BY_FORMULA = {
    "CKA": (lambda: lsim.CKA(minibatch=ALL), lambda x: oracles.oracle_cka([x], row=[TEXT_OF_TOKEN])),
    "exact CKA": (lambda: lsim.CKA(estimator="exact"), lambda x: oracles.oracle_cka([x], row=[TEXT_OF_TOKEN], exact=True)),
    "RSA": (lambda: lsim.RSA(minibatch=ALL), lambda x: oracles.oracle_rsa([x], text=[TEXT_OF_TOKEN])),
    "MutualKNN": (
        lambda: lsim.MutualKNN(k=5, minibatch=ALL),
        lambda x: oracles.oracle_mutual_knn([x], k=5, text=[TEXT_OF_TOKEN]),
    ),
}


@pytest.fixture(scope="module")
def by_formula(states):
    """Gives the value of a measure by its oracle, after the embedding: equal tokens tie there, and no neighbour is nearer."""
    return functools.cache(lambda name: BY_FORMULA[name][1](states[1:])["values"])


@pytest.mark.light("CKA-1", "exact CKA-4", "RSA-4", "MutualKNN-16")
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("name", BY_FORMULA)
def test_pairs_of_one_text_are_left_out_as_the_formula_says(name, batch_size, model, tokens, by_formula):
    make, _oracle = BY_FORMULA[name]
    result = measured(model, lsim.Data(tokens, groups=GROUPS, batch_size=batch_size), make())
    np.testing.assert_allclose(result.values[1:, 1:], by_formula(name), atol=2e-5)
    assert (result.provenance.texts, result.provenance.sequences) == (7, ROWS)
    assert result.texts == 7


GIVEN = {
    "sequence": lambda tokens: lsim.Data(tokens, groups=GROUPS),
    "tensor": lambda tokens: lsim.Data(tokens, groups=torch.tensor(GROUPS)),
    "array of names": lambda tokens: lsim.Data(tokens, groups=np.array([f"text {group}" for group in GROUPS])),
    "column": lambda tokens: lsim.Data({"input_ids": tokens, "document": GROUPS}, groups="document"),
    "column of rows": lambda tokens: lsim.Data(
        [{"input_ids": row, "document": (group, "x")} for row, group in zip(tokens, GROUPS, strict=True)], groups="document"
    ),
}


@pytest.mark.light("sequence", "column of rows")
@pytest.mark.parametrize("given", GIVEN)
def test_groups_may_be_a_column_or_a_sequence_of_any_values(given, model, tokens):
    expected = measured(model, lsim.Data(tokens, groups=GROUPS), lsim.CKA(permutations=19), intervals=True)
    result = measured(model, GIVEN[given](tokens), lsim.CKA(permutations=19), intervals=True)
    assert torch.equal(result.values, expected.values)
    assert torch.equal(result.p_values, expected.p_values)
    assert result.provenance.data == expected.provenance.data


def test_a_list_of_groups_that_was_changed_is_read_again(model, tokens):
    groups = list(GROUPS)
    data = lsim.Data(tokens, groups=groups)
    assert measured(model, data, lsim.Cosine()).provenance.texts == 7
    groups[0] = "another"
    assert measured(model, data, lsim.Cosine()).provenance.texts == 8


WRONG = {
    "too few": ({"groups": GROUPS[1:]}, r"`groups` .*\b23\b"),
    "too many": ({"groups": [*GROUPS, 1]}, r"`groups` .*\b25\b.*\b24\b"),
    "no column": ({"groups": "document"}, r"`groups` .*'document'"),
    "missing": ({"groups": [*GROUPS[1:], None]}, r"`groups` .*None.*\b23\b"),
    "not hashable": ({"groups": [*GROUPS[1:], {1}]}, r"`groups` .*\{1\}"),
    "tensors with axes": ({"groups": [torch.tensor([group, 1]) for group in GROUPS]}, r"`groups` .*\(2,\)"),
    "objects without equality": ({"groups": [object() for _ in GROUPS]}, r"`groups` .*object"),
    "a number": ({"groups": 3}, r"`groups` .*\b3\b"),
}


@pytest.mark.parametrize("name", WRONG)
def test_groups_that_do_not_fit_are_refused(name, model, tokens):
    options, match = WRONG[name]
    with pytest.raises(lsim.LayersimError, match=match):
        measured(model, lsim.Data(tokens, **options), lsim.Cosine())


@pytest.mark.parametrize("column", ["input_ids", "attention_mask", "labels", "chosen"])
def test_a_column_with_a_value_for_each_position_is_no_column_of_groups(column, model, tokens):
    columns = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens, "chosen": tokens > 9}
    for source in (columns, [{name: value[row] for name, value in columns.items()} for row in range(ROWS)]):
        with pytest.raises(lsim.LayersimError, match=f"`groups` .*'{column}'"):
            measured(model, lsim.Data(source, groups=column, positions="chosen"), lsim.Cosine())


def test_a_class_of_each_row_may_be_its_group(model, tokens):
    columns = {"input_ids": tokens, "label": torch.tensor(GROUPS)}
    result = measured(model, lsim.Data(columns, groups="label"), lsim.Cosine())
    assert result.provenance.texts == 7


def test_fewer_than_four_texts_are_refused_by_name(model, tokens):
    with pytest.raises(lsim.LayersimError, match=r"CKA .*\b4 texts.*\b24 rows of 3 texts"):
        measured(model, lsim.Data(tokens, groups=[number % 3 for number in range(ROWS)]), lsim.CKA())


@pytest.mark.parametrize("seed", range(4))
def test_one_text_has_no_held_out_part(seed, model, tokens):
    """The text is either for the fit or held out, by the seed."""
    data = lsim.Data({"input_ids": tokens, "label": torch.arange(ROWS) % 2}, groups=["one"] * ROWS)
    with pytest.raises(lsim.LayersimError, match=r"\b120\b.*text or group"):
        lsim.linear_probe(model, data, lsim.LinearProbe(labels="data", seed=seed))
    with pytest.raises(lsim.LayersimError, match=r"\b0\b.*\b1 text\b"):
        measured(model, data, lsim.LinearPredictivity(seed=seed))


ANALYZERS = [
    lambda: lsim.CKA(permutations=19, minibatch=32),
    lambda: lsim.CKA(estimator="exact"),
    lambda: lsim.RSA(permutations=19, minibatch=32),
    lambda: lsim.MutualKNN(k=3, permutations=19, minibatch=32),
    lambda: lsim.Procrustes(permutations=19),
    lambda: lsim.LinearPredictivity(permutations=19, test_fraction=0.5),
    lambda: lsim.Cosine(),
    lambda: lsim.ExitCurve(),
]


@pytest.mark.light("lsim CKA0", "lsim ExitCurve")
@few_texts
@pytest.mark.parametrize("make", ANALYZERS)
def test_one_group_for_each_row_changes_no_bit(make, model, tokens):
    plain = measured(model, lsim.Data(tokens, batch_size=4), make(), intervals=True)
    result = measured(model, lsim.Data(tokens, batch_size=4, groups=range(ROWS)), make(), intervals=True)
    for name in plain.tensor_fields():
        torch.testing.assert_close(getattr(result, name), getattr(plain, name), rtol=0, atol=0, equal_nan=True)
    assert result.provenance.data == plain.provenance.data
    assert len(result.replicates) == len(plain.replicates)


@pytest.mark.light("lsim CKA0", "lsim MutualKNN", "lsim Cosine", "lsim ExitCurve")
@few_texts
@pytest.mark.parametrize("make", ANALYZERS)
def test_the_batch_size_changes_nothing_where_texts_have_several_rows(make, model, tokens):
    first, *other_sizes = (
        measured(model, lsim.Data(tokens, batch_size=size, groups=GROUPS), make(), intervals=True) for size in (1, 4, 16)
    )
    for result in other_sizes:
        for name in first.tensor_fields():
            torch.testing.assert_close(getattr(result, name), getattr(first, name), rtol=1e-5, atol=1e-5, equal_nan=True)
        assert result.provenance.data == first.provenance.data


@few_texts
def test_no_block_and_no_half_ends_inside_a_text(model, tokens):
    result = measured(model, lsim.Data(tokens, groups=GROUPS), lsim.Cosine(), intervals=True)
    # One block for each text, in the order of its first row.
    assert result.block_tokens == tuple(LENGTH * GROUPS.count(group) for group in dict.fromkeys(GROUPS))

    curve = measured(model, lsim.Data(tokens, groups=GROUPS), lsim.ExitCurve())
    half = int(curve.part_exits[0, 0].sum())
    counts = [LENGTH * GROUPS.count(group) for group in set(GROUPS)]
    assert half in {sum(some) for size in range(len(counts) + 1) for some in itertools.combinations(counts, size)}

    probe = measured(model, lsim.Data(tokens, groups=GROUPS), lsim.LinearPredictivity(test_fraction=0.5))
    assert probe.held_out_samples in {sum(some) for size in range(8) for some in itertools.combinations(counts, size)}


def test_rows_that_the_package_cuts_are_one_text(model):
    """Texts of 20 tokens in rows of 5 give what their rows give with the text as their group."""
    texts = random_tokens(8, 20, seed=3)
    cut = measured(model, lsim.Data(texts, seq_len=5), lsim.CKA(permutations=19), intervals=True)
    grouped = measured(
        model,
        lsim.Data(texts.reshape(32, 5), groups=[row // 4 for row in range(32)]),
        lsim.CKA(permutations=19),
        intervals=True,
    )

    assert cut.provenance.texts == 8
    for name in cut.tensor_fields():
        torch.testing.assert_close(getattr(cut, name), getattr(grouped, name), rtol=0, atol=0, equal_nan=True)
    assert cut.provenance.data == grouped.provenance.data

    alone = measured(model, lsim.Data(texts.reshape(32, 5)), lsim.CKA())
    assert (alone.provenance.texts, alone.provenance.data) == (32, cut.provenance.data)


def test_shards_hold_whole_texts_and_join_to_the_same_bits(model, tokens, tmp_path):
    data = lsim.Data(tokens, groups=[number // 2 for number in range(ROWS)], batch_size=2)
    whole = lsim.analyze(model, data, [lsim.Cosine(center="none")], intervals=True)["cosine"]
    for number in range(3):
        lsim.analyze(
            model,
            data,
            [lsim.Cosine(center="none")],
            intervals=True,
            shard=(number, 3),
            save_to=tmp_path / f"{number}.safetensors",
        )

    merged = lsim.merge(tmp_path)["cosine"]

    assert torch.equal(merged.values, whole.values)
    assert merged.provenance.texts == whole.provenance.texts == 12
    np.testing.assert_allclose(merged.interval("values").low, whole.interval("values").low, equal_nan=True)


@pytest.mark.parametrize("pack", [True, False])
def test_rows_of_one_long_text_are_compared_with_rows_further_away(pack, model):
    """A single text has no second one: its rows stand for texts, and neighbours are in different minibatches."""
    tokenizer = tiny_tokenizer()
    text = " ".join(tokenizer.convert_ids_to_tokens(random_tokens(1, 160, seed=1)[0].tolist()))

    data = lsim.Data([text], tokenizer=tokenizer, seq_len=5, pack=pack)
    with pytest.warns(lsim.LayersimWarning, match=r"parts of one text"):
        result = measured(model, data, lsim.CKA(minibatch=64), intervals=True)

    assert result.provenance.options["rows_as_texts"] == result.provenance.sequences == result.provenance.texts
    # Of 16 rows of a pool, every other one.
    assert result.texts <= 8


def test_texts_that_follow_each_other_and_are_alike_are_named(model):
    """Documents of four equal beginnings, as rows without groups."""
    documents = random_tokens(24, 5, seed=5).repeat_interleave(4, 0)
    documents[:, -1] = random_tokens(96, 1, seed=6)[:, 0]
    with pytest.warns(lsim.LayersimWarning, match=r"groups=") as issued:
        measured(model, documents, lsim.Cosine(), intervals=True)

    assert any("'cosine'" in str(warning.message) for warning in issued)

    groups = [row // 4 for row in range(96)]
    with pytest.warns(lsim.LayersimWarning) as issued:
        result = measured(model, lsim.Data(documents, groups=groups), lsim.Cosine(), intervals=True)
    assert not any("groups=" in str(warning.message) for warning in issued)
    assert any("24 texts" in warning for warning in result.provenance.warnings)
