"""`vectors`: a random sample of the activations of a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import tl_layersim as lsim
from tl_layersim.engine.sample_vectors import chosen_numbers

from ..models.tiny_models import hidden_states, random_tokens, tiny_llama
from ..models.wrapped_models import nnsight

SITES = ("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post", "blocks.2.hook_resid_post")


@pytest.fixture(scope="module")
def masked():
    """Rows of tokens, of which one ends early and one begins late."""
    mask = torch.ones(6, 20, dtype=torch.int64)
    mask[3, 12:] = 0
    mask[4, :5] = 0
    return {"input_ids": random_tokens(6, 20), "attention_mask": mask}


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_samples_are_the_activations_at_their_rows_and_positions(llama, masked, batch_size):
    sampled = lsim.vectors(llama, lsim.Data(masked, batch_size=batch_size, skip_first=2), max_samples=30, seed=3)
    assert tuple(sampled) == SITES
    assert sampled.rows.shape == sampled.positions.shape == sampled.texts.shape == (30,)
    np.testing.assert_array_equal(sampled.texts, sampled.rows)
    for number, (row, position) in enumerate(zip(sampled.rows, sampled.positions, strict=True)):
        mask = masked["attention_mask"][row].bool()
        assert mask[position]
        expected = hidden_states(llama, masked["input_ids"][row][mask])
        place = int(mask[:position].sum())
        # The first two of each row are left out.
        assert place >= 2
        for site, states in zip(SITES, expected, strict=True):
            np.testing.assert_allclose(sampled[site][number], states[place], atol=1e-5)

    # No position is drawn twice, and all are in the order of the data.
    places = sampled.rows * 20 + sampled.positions
    assert (np.diff(places) > 0).all()


def test_all_positions_are_samples_if_there_are_few(llama, masked):
    sampled = lsim.vectors(llama, masked)
    assert len(sampled.rows) == 6 * 20 - 8 - 5
    assert lsim.vectors(llama, masked, at="attn_out")["blocks.2.hook_attn_out"].shape == (107, 32)


def test_every_position_has_the_same_probability():
    total = 50
    most = 10
    seeds = 1500
    counts = torch.zeros(total)
    pairs = 0
    for seed in range(seeds):
        chosen = chosen_numbers(total, most, seed)
        assert len(torch.unique(chosen)) == most
        counts[chosen] += 1
        pairs += int({3, 4} <= set(chosen.tolist()))
    share = most / total
    deviations = (counts - seeds * share) / (seeds * share * (1 - share)) ** 0.5

    # Of 50 normal deviations the largest is below 4 in 99.7 %.
    assert deviations.abs().max() < 4
    assert 0.8 < float(deviations.square().mean()) < 1.25 * (1 + 3 * (2 / total) ** 0.5)

    share_of_pairs = most * (most - 1) / (total * (total - 1))
    assert abs(pairs - seeds * share_of_pairs) < 4 * (seeds * share_of_pairs) ** 0.5


def test_numbers_are_chosen_alike_in_parts(monkeypatch):
    whole = chosen_numbers(5000, 40, seed=1)
    monkeypatch.setattr("tl_layersim.engine.sample_vectors.NUMBERS_AT_ONCE", 128)
    assert torch.equal(chosen_numbers(5000, 40, seed=1), whole)


def test_a_file_holds_the_same_samples_and_is_a_source(llama, masked, tmp_path):
    path = tmp_path / "sampled.safetensors"
    in_memory = lsim.vectors(llama, masked, max_samples=60)
    in_file = lsim.vectors(llama, masked, max_samples=60, path=path)
    stored = load_file(path)

    for site in SITES:
        assert isinstance(in_file[site], np.memmap)
        np.testing.assert_array_equal(in_file[site], in_memory[site])
        np.testing.assert_array_equal(stored[site], in_memory[site])
    for name in ("rows", "positions", "texts"):
        np.testing.assert_array_equal(stored[f"tl_layersim.{name}"], getattr(in_memory, name))
        np.testing.assert_array_equal(getattr(in_file, name), getattr(in_memory, name))

    trajectories = [
        lsim.analyze(lsim.from_vectors(vectors), analyzers=lsim.Trajectory())["trajectory"]
        for vectors in (in_memory, in_file, path)
    ]

    for trajectory in trajectories:
        assert trajectory.layers == SITES
        assert trajectory.provenance.texts == 6
        np.testing.assert_array_equal(trajectory.values, trajectories[0].values)


def test_the_same_samples_give_the_same_cka(llama, masked):
    expected = lsim.analyze(llama, masked, lsim.CKA(estimator="exact"))["cka"]
    vectors = lsim.from_vectors(lsim.vectors(llama, masked))
    result = lsim.analyze(vectors, analyzers=lsim.CKA(estimator="exact"))["cka"]
    np.testing.assert_allclose(result.values, expected.values, atol=1e-9)
    assert result.provenance.texts == expected.provenance.texts == 6


def test_packed_rows_are_texts_of_their_own(demo):
    data = lsim.Data(lsim.demo_text()[:6], pack=True, seq_len=32)
    sampled = lsim.vectors(demo, data, at=[0], max_samples=10_000)
    assert (sampled.rows == -1).all()

    lengths = np.unique(sampled.texts, return_counts=True)[1]
    # The last row may be shorter.
    assert sorted(lengths)[1:] == [32] * (len(lengths) - 1)


def test_rows_of_a_group_are_of_one_text(llama):
    data = lsim.Data(random_tokens(6, 5), groups=["a", "b", "a", "c", "d", "b"])
    sampled = lsim.vectors(llama, data)
    assert dict(zip(sampled.rows.tolist(), sampled.texts.tolist(), strict=True)) == {0: 0, 1: 1, 2: 0, 3: 3, 4: 4, 5: 1}


def test_a_model_on_a_server_is_refused(monkeypatch):
    model = lsim.open_model(nnsight(tiny_llama()), remote=True)
    with pytest.raises(lsim.LayersimError, match="`remote` is True"):
        lsim.vectors(model, random_tokens())


def test_samples_larger_than_memory_are_refused(llama, masked, monkeypatch):
    monkeypatch.setattr(
        "tl_layersim.engine.sample_vectors.psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000})
    )
    with pytest.raises(lsim.LayersimError, match=r"`max_samples`.*50.*`path`"):
        lsim.vectors(llama, masked, max_samples=50)


def test_an_error_leaves_no_file(llama, masked, tmp_path):
    with pytest.raises(lsim.LayersimError, match="`skip_first`"):
        lsim.vectors(llama, lsim.Data(masked, skip_first=20), path=tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_model_runs_once_on_each_batch(llama):
    rows_of_passes = []
    handle = llama.model.layers[0].register_forward_pre_hook(lambda _module, args: rows_of_passes.append(len(args[0])))

    lsim.vectors(llama, lsim.Data(random_tokens(9), batch_size=3), max_samples=5)

    handle.remove()
    # A few rows more are run to test the model.
    assert 9 <= sum(rows_of_passes) <= 9 + 3
