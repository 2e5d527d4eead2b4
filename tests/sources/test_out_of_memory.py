"""Forward passes that run out of memory: rows in parts give the numbers of the whole batch, or are refused."""

from __future__ import annotations

import logging
import weakref

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.sources.hooked_module import HookedSource
from tl_layersim.sources.out_of_memory import is_out_of_memory
from tl_layersim.vision import tower_similarity

from ..models.clip_models import clip_of
from ..models.clip_models import pairs as clip_pairs
from ..models.input_models import bert_blocks, image_vit, pair_bert, pair_data, pixels, vit_blocks
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import bridge, nnsight, transformers_model
from ..running.options import called

GPU = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"


def full_gpu():
    raise torch.OutOfMemoryError(GPU)


def full_cpu():
    # No machine has so much: the allocator's own message.
    torch.empty(2**55)


def full_apple_gpu():
    raise RuntimeError("MPS backend out of memory (MPS allocated: 17.99 GB, max allowed: 18.13 GB). Tried to allocate 2 GB")


FULL = {"GPU": full_gpu, "CPU": full_cpu, "Apple GPU": full_apple_gpu}


def limited(block: torch.nn.Module, rows: int, full=full_gpu) -> list[tuple[int, ...]]:
    """Let a block run out of memory above a number of rows; gives the shapes of its inputs, those that failed included."""
    seen: list[tuple[int, ...]] = []

    def hook(_module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append(tuple(hidden.shape[:2]))
        if len(hidden) > rows:
            full()

    block.register_forward_pre_hook(hook, with_kwargs=True)
    return seen


def llama_block(model: torch.nn.Module) -> torch.nn.Module:
    return model.model.layers[1]


def bert_block(model: torch.nn.Module) -> torch.nn.Module:
    return bert_blocks(model)[1]


def vit_block(model: torch.nn.Module) -> torch.nn.Module:
    return vit_blocks(model)[1]


def texts(count: int = 10):
    """Rows of 20, 19 and 18 tokens."""
    return [row[: 20 - number % 3] for number, row in enumerate(random_tokens(count, 20))]


def run(model):
    every = [lsim.Cosine(), lsim.CKA(minibatch=16), lsim.LogitLens()]
    return lsim.analyze(model, lsim.Data(texts(), batch_size=5), every)


def same(found, expected, tolerance: float = 1e-7):
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_allclose(found[name].values, expected[name].values, atol=tolerance, rtol=0)
        assert found[name].provenance.tokens == expected[name].provenance.tokens


SOURCES = {
    "Hugging Face": lambda model, tmp: model,
    "TransformerBridge": lambda model, tmp: bridge(model),
    "NNsight": lambda model, tmp: nnsight(model),
    "NNsight(TransformerBridge)": lambda model, tmp: nnsight(bridge(model)),
}


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("source", SOURCES)
def test_parts_of_a_batch_give_the_numbers_of_the_whole(source, tmp_path, caplog):
    expected = run(SOURCES[source](tiny_llama(), tmp_path))
    model = tiny_llama()
    seen = limited(model.model.layers[1], 2)
    with caplog.at_level(logging.WARNING, "tl_layersim"):
        found = run(SOURCES[source](model, tmp_path))
    same(found, expected)
    passes = [rows for rows, _ in seen]
    # Two batches, twice because Cosine centres; only the first one is tried whole, and the lens is checked on one row.
    assert [rows for rows in passes if rows > 2] == [5, 3]
    assert passes.count(2) == 8
    # The width of the whole batch, also where the longest row is in another part.
    assert {width for rows, width in seen if rows == 2} == {20}
    [line] = caplog.messages
    assert line.startswith("Out of memory with 5 rows in a forward pass (batch of rows 0 to 4, 20 positions): 2 rows at a time")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_loaded_model_of_nnsight(tmp_path):
    model = transformers_model(tiny_llama(), tmp_path)
    expected = run(model)
    seen = limited(model._module.model.layers[1], 3)
    same(run(model), expected)
    assert max(rows for rows, _ in seen[2:]) <= 3


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("full", FULL)
def test_each_device_says_it_in_its_own_words(full):
    analyzers = [lsim.Cosine(center="none")]
    expected = lsim.analyze(tiny_gpt2(), lsim.Data(texts(), batch_size=8), analyzers)
    model = tiny_gpt2()
    seen = limited(model.transformer.h[0], 1, FULL[full])
    same(lsim.analyze(model, lsim.Data(texts(), batch_size=8), analyzers), expected)
    assert [rows for rows, _ in seen if rows > 1] == [8, 4, 2]


def test_other_errors_are_not_repeated():
    model = tiny_llama()

    def broken():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    seen = limited(model.model.layers[0], 2, broken)
    with pytest.raises(lsim.LayersimError, match=r"fails on this data: RuntimeError: mat1 .* multiplied\.$"):
        run(model)
    assert [rows for rows, _ in seen if rows > 1] == [5]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_longer_batch_may_need_smaller_parts(caplog):
    data = [row[: 10 if number < 4 else 20] for number, row in enumerate(random_tokens(12, 20))]
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16)]
    expected = lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=4), analyzers)
    model = tiny_llama()
    passes = []

    def hook(_module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        passes.append(hidden.shape[0])
        if hidden.shape[0] * hidden.shape[1] > 25:
            full_gpu()

    model.model.layers[2].register_forward_pre_hook(hook, with_kwargs=True)
    with caplog.at_level(logging.WARNING, "tl_layersim"):
        same(lsim.analyze(model, lsim.Data(data, batch_size=4), analyzers), expected)
    assert [line.split(" (")[0] for line in caplog.messages] == [
        "Out of memory with 4 rows in a forward pass",
        "Out of memory with 2 rows in a forward pass",
    ]
    assert passes.count(4) == 1


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["modules", "NNsight"])
def test_comparison_of_models_with_different_limits(wrap):
    def compared(a, b):
        return {"cka": lsim.compare(wrap(a), wrap(b), lsim.Data(texts(), batch_size=5), lsim.CKA(minibatch=16))}

    expected = compared(tiny_llama(), tiny_gpt2())
    a, b = tiny_llama(), tiny_gpt2()
    seen = limited(a.model.layers[0], 3), limited(b.transformer.h[1], 1)
    same(compared(a, b), expected)
    # One row is run to watch the blocks, and one beside the first batch.
    assert [[rows for rows, _ in one] for one in seen] == [[1, 5, 3, 2, 1, 3, 2], [1, 5, 3, 2, *[1] * 11]]


def marked() -> dict[str, torch.Tensor]:
    """Rows of which only one has counted positions."""
    data = {"input_ids": random_tokens(6, 8), "read": torch.zeros(6, 8, dtype=torch.long)}
    data["read"][4, 2:7] = 1
    return data


EXACT, COSINE, SMALL = [lsim.Cosine(), lsim.CKA(minibatch=16)], lsim.Cosine(center="none"), lsim.CKA(minibatch=5)
# Model, its block, data, analyzers, options, and the rows that fit.
KINDS = {
    "blocks of intervals": (tiny_llama, llama_block, random_tokens(40, 8), [COSINE, SMALL], {"intervals": True}, 1),
    "last": (tiny_llama, llama_block, texts(), [lsim.Cosine(), SMALL], {"positions": "last"}, 4),
    "mean": (tiny_llama, llama_block, texts(), [lsim.Cosine(), SMALL], {"positions": "mean"}, 4),
    "no counted position": (tiny_llama, llama_block, marked(), [lsim.Cosine()], {"positions": "read"}, 2),
    "segments": (pair_bert, bert_block, pair_data(), EXACT, {"positions": "all"}, 2),
    "segments, padded left": (pair_bert, bert_block, pair_data(left=True), EXACT, {"positions": "all"}, 2),
    "images": (image_vit, vit_block, pixels(), [COSINE, SMALL], {"positions": "mean"}, 2),
    "labels": (
        *(image_vit, vit_block, {"pixel_values": pixels(8), "labels": torch.arange(8) % 2}),
        *([lsim.NeuralCollapse(labels="data")], {"positions": "mean"}, 3),
    ),
}


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:Intervals of")
@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["module", "NNsight"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind_are_split(kind, wrap):
    make, block_of, data, analyzers, options, rows = KINDS[kind]
    expected = called(lsim.analyze, wrap(make()), data, analyzers, batch_size=8, **options)
    model = make()
    seen = limited(block_of(model), rows)
    found = called(lsim.analyze, wrap(model), data, analyzers, batch_size=8, **options)
    assert max(count for count, _ in seen) > rows
    for name, one in expected.items():
        field = "nc1" if name == "neural_collapse" else "values"
        np.testing.assert_allclose(getattr(found[name], field), getattr(one, field), atol=1e-7, rtol=0)
        if "intervals" in options:
            np.testing.assert_allclose(found[name].interval().error, one.interval().error, atol=1e-7)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("at", ["encoder.resid_post", "decoder.resid_post"])
def test_both_stacks_of_an_encoder_decoder(at):
    from ..engine.test_encoder_decoders import rows
    from ..user_loops.test_attach_stacks import t5

    options = {"at": at, "batch_size": 4, "positions": "all"}
    expected = called(lsim.analyze, t5(), rows(), lsim.Cosine(center="none"), **options)
    model = t5()
    seen = limited(model.encoder.block[1], 2), limited(model.decoder.block[1], 2)
    same(called(lsim.analyze, model, rows(), lsim.Cosine(center="none"), **options), expected, 1e-6)
    assert max(rows for rows, _ in seen[0]) == 4


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_towers_of_a_clip_have_limits_of_their_own():
    model = clip_of()
    expected = tower_similarity(model, lsim.Data(clip_pairs(), batch_size=9))
    blocks = model.vision_model.encoder.layers[1], model.text_model.encoder.layers[1]
    seen = limited(blocks[0], 4), limited(blocks[1], 2)
    try:
        found = tower_similarity(model, lsim.Data(clip_pairs(), batch_size=9))
    finally:
        for block in blocks:
            block._forward_pre_hooks.clear()
            block._forward_pre_hooks_with_kwargs.clear()
    np.testing.assert_allclose(found.values, expected.values, atol=1e-13)
    assert [rows for rows, _ in seen[0] if rows > 1][:2] == [9, 5]


def test_memory_is_given_back_before_the_next_try(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(kept)))
    model = tiny_llama()
    kept: list[weakref.ref] = []
    alive: list[int] = []

    def hook(_module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        alive.append(sum(one() is not None for one in kept))
        if len(hidden) > 2:
            # In a reference cycle, as activations of some models are.
            cycle = [hidden]
            cycle.append(cycle)
            kept.append(weakref.ref(hidden))
            full_gpu()

    model.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)
    run(model)
    assert len(kept) == 2
    assert emptied == [1, 2]
    assert not any(alive), "activations of a failed forward pass were held during the next one"


# ---- what cannot be split


@pytest.mark.parametrize(
    ("make", "block_of", "data", "analyzer", "message"),
    [
        (tiny_llama, llama_block, texts(), "cosine", r"^`seq_len`.*1 row of 20.*seq_len=10"),
        (tiny_llama, llama_block, texts(), "logit_lens", r"^`seq_len`.*1 row"),
        (image_vit, vit_block, pixels(), "cosine", r"^`data`.*1 row"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["module", "NNsight"])
def test_a_row_that_does_not_fit_is_refused(make, block_of, data, analyzer, message, wrap):
    model = make()
    limited(block_of(model), 0)
    with pytest.raises(lsim.LayersimError, match=f"(?s){message}"):
        lsim.analyze(wrap(model), lsim.Data(data, batch_size=5), analyzer)


@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["module", "NNsight"])
def test_analyzers_that_call_blocks_again_need_all_rows(wrap):
    model = tiny_llama()
    seen = limited(model.model.layers[1], 2)
    with pytest.raises(lsim.LayersimError, match=r"(?s)^`batch_size`.*4 rows.*batch_size=2"):
        lsim.analyze(wrap(model), lsim.Data(texts(), batch_size=4), lsim.BlockCoupling(k=2))
    # A comparison of rows, which calls no block again, may run in parts before.
    assert [rows for rows, _ in seen if rows > 1][-1] == 4


def test_processes_that_share_weights_stay_together(monkeypatch):
    monkeypatch.setattr("tl_layersim.sources.source.weight_peers", lambda module: frozenset({0, 1}))
    model = tiny_llama()
    seen = limited(model.model.layers[1], 2)
    source = HookedSource(model)
    from tl_layersim.data.batches import Batches

    [batch] = Batches(lsim.Data(texts(4)), source.model)
    with pytest.raises(lsim.LayersimError, match=r"^`batch_size`.*4 rows"):
        source.collect(batch)
    assert len(seen) == 1


def hungry(view, *others):
    raise torch.OutOfMemoryError(GPU)


class Hungry(lsim.Cosine):
    def kernel(self, first):
        return hungry


@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["module", "NNsight"])
def test_a_kernel_that_runs_out_of_memory_names_the_batch_size(wrap):
    with pytest.raises(lsim.LayersimError, match=r"^`batch_size` .*cosine.* 4 .* 20 .*batch_size=2"):
        lsim.analyze(wrap(tiny_llama()), lsim.Data(texts(), batch_size=5), Hungry(center="none"))


def test_a_kernel_of_two_models_names_the_batch_size():
    with pytest.raises(lsim.LayersimError, match=r"^`batch_size`.*cka.*batch_size=2"):
        lsim.compare(tiny_llama(), tiny_gpt2(), lsim.Data(texts(), batch_size=5), HungryCKA())


class HungryCKA(lsim.CKA):
    def kernel(self, first):
        return hungry


def test_an_attached_loop_sees_its_own_error():
    model = tiny_llama()
    seen = limited(model.model.layers[1], 2)
    tokens = random_tokens(4, 8)
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        with pytest.raises(torch.OutOfMemoryError):
            model(tokens)
        model(tokens[:2])
    assert [rows for rows, _ in seen] == [4, 2]
    assert probe.results()["cosine"].provenance.tokens == 16


def test_messages_of_torch():
    cublas = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError(cublas))
    assert not is_out_of_memory(ValueError("out of memory"))
