"""Jacobians of blocks, and how their singular vectors couple: against naive derivatives, NumPy, and planted cases."""

from __future__ import annotations

import warnings

import nnsight
import numpy as np
import pytest
import torch
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.calls import BlockCall, Widened, again, note_call
from tl_layersim.coupling import Connections, Options, couple
from tl_layersim.jacobian import Jacobian
from tl_layersim.layout import find_blocks
from tl_layersim.spectrum import krylov, top_of

from . import oracles
from .conftest import from_views, random_tokens, residuals, tiny_gpt2, tiny_llama, tiny_tokenizer, view, worst

MEMORY = 200.0


def family(name: str, attention: str = "sdpa"):
    """A small random model of a layout, with weights large enough that blocks change the stream."""
    import transformers as hf

    wide = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    wide |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": attention}
    grouped = wide | {"num_key_value_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": attention}
    gpt = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64} | ids
    torch.manual_seed(0)
    model = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt)),
        "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**wide)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped)),
        "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**grouped, head_dim=12)),
        "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**grouped, head_dim=12, sliding_window=4)),
        "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**grouped, head_dim=12, sliding_window=4)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**grouped, sliding_window=4)),
        "opt": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                hidden_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=96,
                vocab_size=100,
                word_embed_proj_dim=48,
                **ids,
            )
        ),
        "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=48, n_layer=2, n_head=4, vocab_size=100, **ids)),
        "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(hidden_size=48, num_hidden_layers=2, vocab_size=100)),
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


# Of these, the block is called on single tokens; of the others on whole rows.
NARROW = ("llama", "gpt2", "neox", "qwen2", "gemma", "gemma2", "gemma3", "mistral", "opt")


def calls_of(model, run) -> tuple[BlockCall, ...]:
    """What the blocks of a plain model were given, read by hooks of the test's own."""
    found, given, handles = [], {}, []
    for path in find_blocks(model, None):
        block = model.get_submodule(path)
        handles.append(block.register_forward_pre_hook(lambda m, a, k: given.update({m: (a, k)}), with_kwargs=True))
        handles.append(block.register_forward_hook(lambda m, a, o: found.append(note_call(m, *given[m], o))))
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    return tuple(found)


def padded_run(model):
    tokens = random_tokens(3, 11)
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[1, 8:] = 0
    return lambda: model(tokens, attention_mask=mask, use_cache=False)


def naive(call: BlockCall, row: int, t_in: int, t_out: int) -> Tensor:
    """One backward pass of the whole block for each output, in float64."""
    hidden = call.hidden.double()
    x = hidden[row, t_in].clone().requires_grad_()
    with Widened(call.block, torch.float64):
        full = hidden.index_put((torch.tensor([row]), torch.tensor([t_in])), x[None])
        y = again(call, full)[row, t_out] - (x if t_in == t_out else 0)
        rows = [torch.autograd.grad(one, x, retain_graph=True)[0] for one in y]
    return torch.stack(rows)


PAIRS = [(0, 10, 10), (1, 7, 7), (2, 10, 10), (0, 2, 5), (0, 2, 10), (1, 0, 0), (0, 5, 5)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*NARROW, "bloom", "mamba"])
def test_jacobians_are_the_naive_ones(name, attention):
    if (name, attention) in (("mamba", "eager"), ("gemma2", "sdpa"), ("bloom", "sdpa")):
        pytest.skip("has it in one form only")
    model = family(name, attention)
    call = calls_of(model, padded_run(model))[1]
    row, t_in, t_out = torch.tensor(PAIRS).T
    expected = torch.stack([naive(call, *pair) for pair in PAIRS])
    assert float(expected[3].norm()) > 1e-3
    v = torch.randn(len(PAIRS), 48, 5)
    for narrow in (True, False):
        with torch.no_grad(), Jacobian(call, row, t_in, t_out, MEMORY, narrow=narrow) as jacobian:
            assert jacobian.general == (not narrow or name not in NARROW)
            assert not jacobian.differs
            dense = jacobian.dense()
            forward, transposed = jacobian.forward(v), jacobian.transposed(v)
        torch.testing.assert_close(dense.double(), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))
        assert float((dense - expected).norm() / expected.norm()) < 1e-5
        assert float((forward - expected.float() @ v).norm() / forward.norm()) < 1e-5
        assert float((transposed - expected.float().mT @ v).norm() / transposed.norm()) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "gemma3"])
def test_bridges_are_called_on_single_tokens_too(name):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    plain, twin = family(name), family(name)
    bridge = build_bridge_from_module(twin, type(twin).__name__, hf_config=twin.config)
    tokens = random_tokens(3, 11)
    analyzer = lsim.BlockCoupling(k=6)
    expected = lsim.analyze(plain, tokens, analyzer)["block_coupling"]
    found = lsim.analyze(bridge, tokens, analyzer)["block_coupling"]
    assert float(found.whole_rows.max()) == 0
    assert worst(expected, found) < 1e-5


def test_hooked_transformers_run_whole_rows():
    tl = pytest.importorskip("transformer_lens")
    try:
        hooked_class = tl.HookedTransformer
    except ImportError:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    cfg = {"n_layers": 2, "d_model": 24, "n_ctx": 32, "d_head": 6, "d_vocab": 100, "act_fn": "gelu", "seed": 0}
    model = hooked_class(tl.HookedTransformerConfig(**cfg, positional_embedding_type="rotary", rotary_dim=6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tokens = random_tokens(2, 9)
    found = lsim.block_jacobians(model, tokens[0], layers=[1], positions=[(3, 8), 8])
    _, cache = model.run_with_cache(tokens[:1])
    x = cache["blocks.1.hook_resid_pre"]
    whole = torch.autograd.functional.jacobian(lambda h: model.blocks[1](h)[0, 8], x)[:, 0]
    torch.testing.assert_close(found.values[0, 0].float(), whole[:, 3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.values[0, 1].float(), whole[:, 8] - torch.eye(24), rtol=1e-4, atol=1e-5)


def test_every_source_gives_the_same():
    tokens, analyzer = random_tokens(4, 12), lsim.BlockCoupling(k=(6, 2))
    expected = lsim.analyze(tiny_llama(), tokens, analyzer)["block_coupling"]
    for other in (tiny_llama(), nnsight.NNsight(tiny_llama())):
        assert worst(expected, lsim.analyze(other, tokens, analyzer)["block_coupling"]) < 1e-6
    server = nnsight.TransformersModel(tiny_llama(), task="text-generation", tokenizer=tiny_tokenizer())
    for remote in (False, "local"):
        assert worst(expected, lsim.analyze(server, tokens, analyzer, remote=remote)["block_coupling"]) < 1e-6


@pytest.mark.parametrize(("method", "off"), [("krylov", 1e-5), ("finite-difference", 1e-3)])
def test_methods_agree(method, off):
    tokens = random_tokens(3, 12)
    dense = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=6, method="dense"))["block_coupling"]
    other = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=6, method=method))["block_coupling"]
    assert float((dense.values - other.values).abs().max()) < off
    assert other.method == method
    assert float(other.residual.max()) < 1e-4
    stated = float(other.step_error.max())
    assert stated == 0 if method == "krylov" else 1e-6 < stated < 1e-2


def test_little_memory_changes_nothing():
    tokens = random_tokens(5, 12)
    much, little = (
        lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=6, memory_mb=mb))["block_coupling"] for mb in (1000, 1e-4)
    )
    assert worst(much, little) < 1e-5


def test_half_precision_weights_are_widened_and_left_as_they_were():
    model = tiny_llama(dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = random_tokens(1, 9)
    found = lsim.block_jacobians(model, tokens[0], layers=[1])
    call = calls_of(model, lambda: model(tokens, use_cache=False))[1]
    # Of the weights and activations as they are, in more digits than they have.
    expected = naive(call, 0, 8, 8)
    assert float((found.values[0, 0] - expected).norm() / expected.norm()) < 1e-5
    after = model.state_dict()
    assert all(after[name].dtype == torch.bfloat16 and torch.equal(after[name], value) for name, value in before.items())


def test_a_model_is_left_as_it_was_when_something_fails():
    model = tiny_llama(dtype=torch.bfloat16)
    tokens = random_tokens(2, 9)
    call = calls_of(model, lambda: model(tokens, use_cache=False))[1]
    where = torch.tensor([0])
    with pytest.raises(KeyboardInterrupt), Jacobian(call, where, where, where, MEMORY):
        raise KeyboardInterrupt
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(IndexError), Jacobian(call, torch.tensor([7]), where, where, MEMORY):
        pass
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_model_is_left_as_it_was_when_memory_ends_while_it_is_widened(monkeypatch):
    model = tiny_llama(dtype=torch.bfloat16)
    call = calls_of(model, lambda: model(random_tokens(2, 9), use_cache=False))[1]
    # Distributed training listens at what accumulates gradients.
    weight = model.model.layers[1].mlp.up_proj.weight
    accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
    plain, room = Tensor.to, [3]

    def to(self, *args, **kwargs):
        room[0] -= 1
        if room[0] < 0:
            raise torch.OutOfMemoryError("no memory")
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", to)
        with pytest.raises(torch.OutOfMemoryError), Widened(call.block, torch.float32):
            pass
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with Widened(call.block, torch.float32):
        assert {p.dtype for p in call.block.parameters()} == {torch.float32}
    assert weight.view_as(weight).grad_fn.next_functions[0][0] is accumulator
    assert model.model.layers[1].mlp.up_proj.weight is weight


def test_neither_gradients_nor_hooks_are_left():
    model = tiny_llama()
    lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def linear_view(matrices: list[np.ndarray], tokens: int = 3) -> lsim.View:
    """A view of blocks x + J x with given J, for each token alone."""
    width = len(matrices[0])
    x = [np.random.default_rng(0).normal(size=(tokens, width))]
    for matrix in matrices:
        x.append(x[-1] + x[-1] @ matrix.T)
    stack = torch.tensor(np.array(x))

    def block(matrix):
        return lambda hidden: hidden + hidden @ torch.tensor(matrix.T, dtype=hidden.dtype)

    calls = [BlockCall(block(m), (stack[i][None],), {}, 0, stack[i + 1][None]) for i, m in enumerate(matrices)]
    return view(np.array(x), calls=tuple(calls))


def frames(seed: int, width: int = 24) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(np.linalg.qr(rng.normal(size=(width, width)))[0] for _ in range(2))


@pytest.mark.parametrize("method", ["dense", "krylov"])
def test_blocks_that_share_their_singular_vectors_are_coupled(method):
    u, v = frames(0)
    spectrum = np.geomspace(4, 0.1, 24)
    shared = [u @ np.diag(spectrum * scale) @ v.T for scale in (1.0, 0.5, 2.0)]
    found = from_views(lsim.BlockCoupling(k=6, method=method), [linear_view(shared)])
    assert float(found.values.abs().max()) < 1e-5
    np.testing.assert_allclose(found.singular_values[0], spectrum[:6], rtol=1e-9)
    # With the sign of the right vectors turned, they diagonalise each other as well; but not with positive entries.
    turned = [shared[0], -shared[1]]
    assert float(from_views(lsim.BlockCoupling(k=6, method=method), [linear_view(turned)]).values.abs().max()) < 1e-5
    strict = from_views(lsim.BlockCoupling(k=6, method=method, diagonal="positive"), [linear_view(turned)])
    np.testing.assert_allclose(strict.values[0, 1], 2.0, atol=1e-4)


def test_independent_blocks_are_as_the_null():
    spectrum = np.geomspace(4, 0.5, 24)
    views = []
    for seed in range(40):
        matrices = []
        for layer in range(3):
            u, v = frames(100 * seed + layer)
            matrices.append(u @ np.diag(spectrum) @ v.T)
        views.append(linear_view(matrices))
    found = from_views(lsim.BlockCoupling(k=(5, 2)), views)
    assert abs(found.mean("values") - found.mean("null")) < 0.02
    assert abs(found.mean("null") - np.sqrt(1 - 1 / 5)) < 0.03
    assert abs(float(found.null_by_k[1][0, 1]) - np.sqrt(1 - 1 / 2)) < 0.1
    assert float(found.null.diagonal().abs().max()) == 0


def test_smaller_k_is_nested():
    tokens = random_tokens(3, 12)
    many = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=(8, 3)))["block_coupling"]
    few = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=3))["block_coupling"]
    assert many.ks == (8, 3)
    torch.testing.assert_close(many.by_k[1], few.values, rtol=0, atol=1e-7)
    torch.testing.assert_close(many.by_k[0], many.values, rtol=0, atol=0)
    assert many.singular_values.shape == (3, 8)


def test_without_normalisation_it_is_m():
    data = [residuals(1)[:, :9]]
    jacobians = [oracles.own_jacobian(data[0][layer], layer, 8, 8) for layer in range(3)]
    found = from_views(lsim.BlockCoupling(k=3, normalize=False), [view(data[0])])
    expected = oracles.miscoupling(oracles.coupling_matrix(jacobians[0], jacobians[2], 3), normalize=False)
    assert abs(float(found.values[0, 2]) - expected) < 1e-10
    torch.testing.assert_close(found.coupling, -found.values)


def test_positions_are_tokens_of_each_prompt():
    x = residuals(2)[:, :9]
    found = from_views(lsim.BlockCoupling(k=3, positions=(0, -2)), [view(x)])
    expected = []
    for t in (0, 7):
        js = [oracles.own_jacobian(x[layer], layer, t, t) for layer in range(3)]
        expected.append([[oracles.miscoupling(oracles.coupling_matrix(a, b, 3)) for b in js] for a in js])
    np.testing.assert_allclose(found.values, np.mean(expected, 0), atol=1e-9)
    assert (found.lengths, found.length_count.tolist()) == (("8 to 15",), [2.0])
    with pytest.raises(lsim.LayersimError, match=r"shorter than the positions(.|\n)*at least 13"):
        lsim.analyze(tiny_llama(), random_tokens(2, 12), lsim.BlockCoupling(k=3, positions=(12,)))


def test_degenerate_jacobians():
    u, v = frames(3)
    # Rank 2, repeated singular values, and nothing at all.
    poor = u[:, :2] @ np.diag([3.0, 3.0]) @ v[:, :2].T
    nothing = np.zeros((24, 24))
    full = u @ np.diag(np.geomspace(2, 0.2, 24)) @ v.T
    for method in ("dense", "krylov"):
        found = from_views(lsim.BlockCoupling(k=(5, 2), method=method), [linear_view([poor, full, nothing])])
        np.testing.assert_allclose(found.singular_values[0], [3, 3, 0, 0, 0], atol=1e-6)
        # A basis of fewer than k directions says nothing, a Jacobian of 0 neither; both are in nobody's mean.
        assert found.values.isnan().tolist() == [[True, False, True], [True, False, True], [True, True, True]]
        assert found.by_k[1].isnan().tolist() == [[False, False, True], [False, False, True], [True, True, True]]
        assert found.defined.tolist() == [[0, 1, 0], [0, 1, 0], [0, 0, 0]]
        np.testing.assert_allclose(found.mean(), float(found.coupling[0, 1]))
        expected = oracles.miscoupling(oracles.coupling_matrix(poor, full, 5))
        np.testing.assert_allclose(found.values[0, 1], expected, atol=1e-5)


def test_a_single_block_has_nothing_to_couple_with():
    found = lsim.analyze(tiny_llama(layers=1), random_tokens(2, 9), lsim.BlockCoupling(k=4))["block_coupling"]
    assert found.values.shape == (1, 1)
    assert np.isnan(found.mean())
    assert list(found.headline()) == ["largest singular value"]
    assert len(found.by_length) == 0


def test_one_token():
    found = lsim.analyze(tiny_llama(), random_tokens(3, 1), lsim.BlockCoupling(k=4))["block_coupling"]
    assert found.lengths == ("1",)
    assert float(found.whole_rows.max()) == 0


class TestKrylov:
    def jacobian(self):
        model = tiny_llama(dtype=torch.float64)
        call = calls_of(model, lambda: model(random_tokens(3, 12), use_cache=False))[1]
        at = torch.full((3,), 11)
        return Jacobian(call, torch.arange(3), at, at, MEMORY)

    def test_it_finds_the_singular_triplets(self):
        with torch.no_grad(), self.jacobian() as jacobian:
            dense, found = top_of(jacobian.dense(), 5), krylov(jacobian, 5, 0)
        torch.testing.assert_close(found.s, dense.s, rtol=1e-7, atol=0)
        for ours, theirs in ((found.u, dense.u), (found.v, dense.v)):
            torch.testing.assert_close((ours * theirs).sum(1).abs(), torch.ones(3, 5, dtype=torch.float64), rtol=0, atol=1e-6)
        torch.testing.assert_close(found.u.mT @ found.u, torch.eye(5, dtype=torch.float64).expand(3, -1, -1))

    def test_it_stops_at_the_full_space(self):
        with torch.no_grad(), self.jacobian() as jacobian:
            found = krylov(jacobian, 32, 0)
            dense = top_of(jacobian.dense(), 32)
        torch.testing.assert_close(found.s, dense.s, rtol=1e-5, atol=0)

    def test_auto_says_what_it_picked(self):
        from tl_layersim.coupling import pick_method

        assert pick_method(768, 12, 10) == "dense"
        assert pick_method(4096, 32, 10) == "krylov"
        assert pick_method(4096, 32, 50) == "dense"
        found = lsim.analyze(tiny_llama(), random_tokens(1, 5), lsim.BlockCoupling(k=4))["block_coupling"]
        assert (found.method, found.provenance.options["method"]) == ("dense", "auto")


class TestPrompt:
    def test_jacobians_of_one_prompt(self):
        model, tokens = tiny_llama(), random_tokens(1, 9)
        call = calls_of(model, lambda: model(tokens, use_cache=False))[2]
        found = lsim.block_jacobians(model, tokens[0], layers=[0, -1], positions=[(2, 6), (6, 2), 3, (0, -1)])
        assert (found.blocks, found.pairs) == (
            ("blocks.0.hook_resid_post", "blocks.2.hook_resid_post"),
            ("2 > 6", "6 > 2", "3 > 3", "0 > 8"),
        )
        for number, pair in enumerate([(2, 6), None, (3, 3), (0, 8)]):
            expected = torch.zeros(32, 32) if pair is None else naive(call, 0, *pair)
            torch.testing.assert_close(found.values[1, number].float(), expected.float(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found.singular_values[1, 0], np.linalg.svd(found.values[1, 0])[1], atol=1e-9)
        assert float(found.values[:, 1].abs().max()) == 0

    def test_finite_differences_of_one_prompt(self):
        model, tokens = tiny_llama(), random_tokens(1, 9)
        exact, near = (
            lsim.block_jacobians(model, tokens[0], positions=[(2, 6), -1], method=m) for m in ("dense", "finite-difference")
        )
        off = (exact.values - near.values).flatten(1).norm(dim=1) / exact.values.flatten(1).norm(dim=1)
        assert float(off.max()) < 2e-3
        assert bool((off < 3 * near.step_error).all())

    @pytest.mark.parametrize(
        ("along", "more", "where"),
        [
            ("depth", {"token": 3}, [(0, 3, 3), (1, 3, 3), (2, 3, 3)]),
            ("self", {"layers": [0, 2], "positions": [1, 4]}, [(0, 1, 1), (0, 4, 4), (2, 1, 1), (2, 4, 4)]),
            ("fixed-input", {"positions": [0, 3, 5]}, [(1, 0, 0), (1, 0, 3), (1, 0, 5)]),
            ("fixed-output", {"layers": [2], "positions": [0, 3, 5]}, [(2, 0, 5), (2, 3, 5), (2, 5, 5)]),
        ],
    )
    def test_coupling_matrices_are_those_of_the_formula(self, along, more, where):
        model, tokens = tiny_llama(dtype=torch.float64), random_tokens(1, 6)
        found = lsim.coupling_matrices(model, tokens[0], along=along, k=4, **more)
        assert found.connections == tuple(f"{block}: {a} > {b}" for block, a, b in where)
        calls = calls_of(model, lambda: model(tokens, use_cache=False))
        js = [naive(calls[block], 0, a, b).numpy() for block, a, b in where]
        for i, a in enumerate(js):
            np.testing.assert_allclose(found.singular_values[i], np.linalg.svd(a)[1][:4], rtol=1e-8)
            for j, b in enumerate(js):
                expected = oracles.coupling_matrix(a, b, 4)
                # Singular vectors have no sign of their own: u and v turn together.
                np.testing.assert_allclose(np.abs(found.matrices[i, j]), np.abs(expected), atol=1e-7)
                np.testing.assert_allclose(found.values[i, j], oracles.miscoupling(expected), atol=1e-7)

    def test_what_cannot_be_asked_is_refused(self):
        model, tokens = tiny_llama(), random_tokens(1, 9)[0]
        for match, call in {
            "no effect on earlier": lambda: lsim.coupling_matrices(model, tokens, along="fixed-input", token=3, positions=[1]),
            "no such token": lambda: lsim.coupling_matrices(model, tokens, token=9),
            "no such block": lambda: lsim.block_jacobians(model, tokens, layers=[3]),
            "stands twice": lambda: lsim.block_jacobians(model, tokens, layers=[0, -3]),
            "no position": lambda: lsim.block_jacobians(model, tokens, positions=["first"]),
            "no number of singular": lambda: lsim.coupling_matrices(model, tokens, k=33),
            "no one token": lambda: lsim.coupling_matrices(model, tokens, along="self", token=1),
            "no tokens that vary": lambda: lsim.coupling_matrices(model, tokens, positions=[1]),
            "stands twice.": lambda: lsim.coupling_matrices(model, tokens, along="self", positions=[-1, 8]),
            "nothing to relate": lambda: lsim.coupling_matrices(model, tokens, along="self", positions=[]),
            "is no position": lambda: lsim.block_jacobians(model, tokens, positions=[("a", 1)]),
            "need some memory": lambda: lsim.block_jacobians(model, tokens, memory_mb=float("nan")),
        }.items():
            with pytest.raises(lsim.LayersimError, match=match):
                call()

    def test_they_survive_a_file_and_are_drawn(self, tmp_path):
        model, tokens = tiny_llama(), random_tokens(1, 5)[0]
        for found in (lsim.block_jacobians(model, tokens, layers=[0]), lsim.coupling_matrices(model, tokens, k=3)):
            again_ = lsim.load(found.save(tmp_path / "one.safetensors"))
            assert worst(found, again_) == 0
            assert found.plot().data
            assert found.headline()


def tiny_bert():
    from transformers import BertConfig, BertForMaskedLM

    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**small, vocab_size=100)).eval()


class TestRefusals:
    def test_post_norm_blocks(self):
        model = tiny_bert()
        with pytest.raises(lsim.LayersimError, match="no residual branch"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4))

    def test_post_norm_blocks_of_a_bridge(self):
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        model = tiny_bert()
        bridge = build_bridge_from_module(model, "BertForMaskedLM", hf_config=model.config)
        with pytest.raises(lsim.LayersimError, match="no residual branch"):
            lsim.block_jacobians(bridge, random_tokens(1, 9)[0])

    def test_a_sandbox_is_told_of_finite_differences(self):
        from dataclasses import replace

        model = replace(lsim.demo_model() and _described(), calls="values")
        with pytest.raises(lsim.LayersimError, match=r"sandbox(.|\n)*method='finite-difference'"):
            lsim.BlockCoupling().check(model)
        lsim.BlockCoupling(method="finite-difference").check(model)
        with pytest.raises(lsim.LayersimError, match="does not offer"):
            lsim.BlockCoupling().check(replace(model, calls="none"))

    def test_blocks_with_a_state(self):
        model = tiny_llama()
        count = [0]

        def drift(_module, _args, output):
            count[0] += 1
            return output * (1 + 0.1 * count[0])

        handle = model.model.layers[1].register_forward_hook(drift)
        with pytest.raises(lsim.LayersimError, match=r"does not give what it gave(.|\n)*blocks\.1\.hook_resid_post"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4))
        handle.remove()

    def test_a_probe(self):
        with pytest.raises(lsim.LayersimError, match="calls blocks again"), lsim.attach(tiny_llama(), lsim.BlockCoupling(k=4)):
            pass

    def test_options(self):
        for options in ({"k": 0}, {"k": 1}, {"k": ()}, {"k": (5, 5)}, {"positions": ()}, {"memory_mb": 0}):
            with pytest.raises(lsim.LayersimError):
                lsim.BlockCoupling(**options)
        with pytest.raises(lsim.LayersimError, match="k of at most 32"):
            lsim.analyze(tiny_llama(), random_tokens(2, 9), lsim.BlockCoupling(k=33))


def _described() -> lsim.Model:
    from tl_layersim.sources import open_source

    return open_source(tiny_llama()).model


class TestRelate:
    NAMES = ("a", "b", "c", "d", "e")

    def test_it_is_the_least_squares_line(self):
        from scipy.stats import t as student

        x, y = np.array([0.1, 0.15, 0.3, 0.32, 0.5]), np.array([30.0, 41.0, 38.0, 55.0, 60.0])
        found = lsim.relate(dict(zip(self.NAMES, x, strict=True)), dict(zip(self.NAMES, y, strict=True)), confidence=0.9)
        slope = np.cov(x, y, bias=True)[0, 1] / x.var()
        rest = y - y.mean() - slope * (x - x.mean())
        assert abs(found.slope - slope) < 1e-9
        assert abs(found.r_squared - (1 - rest @ rest / ((y - y.mean()) ** 2).sum())) < 1e-12
        error = np.sqrt(rest @ rest / 3 / ((x - x.mean()) ** 2).sum())
        assert abs(found.p_value - 2 * student.sf(slope / error, 3)) < 1e-9
        at = found.band[10].numpy()
        spread = np.sqrt(rest @ rest / 3 * (1 / 5 + (at[0] - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()))
        np.testing.assert_allclose(at[3] - at[1], student.ppf(0.95, 3) * spread, rtol=1e-9)
        assert len(found.plot().data) == 4
        assert list(found.to_frame()["model"]) == list(self.NAMES)

    def test_results_are_taken_by_their_mean(self):
        results = {str(seed): from_views(lsim.BlockCoupling(k=3), [view(residuals(seed)[:, :9])]) for seed in range(3)}
        found = lsim.relate(results, {"0": 1.0, "1": 2.0, "2": 4.0})
        other = ~torch.eye(3, dtype=torch.bool)
        np.testing.assert_allclose(found.coupling, [float((1 - r.values)[other].mean()) for r in results.values()])

    def test_what_has_no_line_is_refused(self):
        for couplings, scores, match in (
            ({"a": 1, "b": 2}, {"a": 1, "b": 2}, "so few"),
            ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "d": 3}, "c, d on one side"),
            ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 3}, "no line"),
            ({"a": 1, "b": float("nan"), "c": 1}, {"a": 1, "b": 2, "c": 3}, "no line"),
            ({"a": 0.1, "b": 0.1 + 1e-14, "c": 0.1}, {"a": 1, "b": 2, "c": 3}, "no line"),
            ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1, "c": 1}, "no line"),
            ({"a": None, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 4}, "no coupling"),
        ):
            with pytest.raises(lsim.LayersimError, match=match):
                lsim.relate(couplings, scores)

    def test_pictures(self):
        found = from_views(lsim.BlockCoupling(k=3), [view(residuals(1)[:, :9])])
        sweep = lsim.plot_sweep({1: found, 64: found, 512: found})
        assert [line.name for line in sweep.data] == ["all pairs", "neighbours", "random vectors"]
        assert sweep.layout.xaxis.type == "log"
        np.testing.assert_allclose(sweep.data[0].y, [found.mean()] * 3)
        np.testing.assert_allclose(sweep.data[2].y, [1 - found.mean("null")] * 3)
        graph = lsim.plot_adjacency(found)
        assert list(graph.data[-1].text) == ["0", "1", "2"]
        edges = {frozenset(one[:2]): one[2] for one in graph.data[-2].customdata}
        chance = (found.null[0, 2] - found.values[0, 2]) / found.null[0, 2]
        back = (found.null[2, 0] - found.values[2, 0]) / found.null[2, 0]
        expected = max(0.0, float(chance + back) / 2)
        assert abs(edges[frozenset(("blocks.0.hook_resid_post", "blocks.2.hook_resid_post"))] - expected) < 1e-12
        assert "R2" in repr(lsim.relate({"a": 0.1, "b": 0.2, "c": 0.4}, {"a": 1, "b": 2, "c": 3}))
        raw = from_views(lsim.BlockCoupling(k=3, normalize=False), [view(residuals(1)[:, :9])])
        for bad in ({}, {1: found, 2: raw}, {1: found, 2: "x"}):
            with pytest.raises(lsim.LayersimError):
                lsim.plot_sweep(bad)
        with pytest.raises(lsim.LayersimError, match="between 0 and 1"):
            lsim.plot_adjacency(raw)
        assert raw.mean() < 0
        assert lsim.plot_sweep({0: found, 1: found, 512: found}).layout.xaxis.type == "category"


def test_it_runs_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lsim.analyze(tiny_gpt2(), random_tokens(2, 9), lsim.BlockCoupling(k=4))


def test_a_row_s_jacobians_do_not_depend_on_its_neighbours():
    model, rows = tiny_llama(), [random_tokens(1, n, seed=n)[0] for n in (4, 9, 17)]
    together = lsim.analyze(model, rows, lsim.BlockCoupling(k=4))["block_coupling"]
    alone = [lsim.analyze(model, [row], lsim.BlockCoupling(k=4))["block_coupling"].values for row in rows]
    torch.testing.assert_close(together.values, torch.stack(alone).mean(0), rtol=0, atol=1e-5)


def test_couple_relates_connections_of_one_row_only():
    model = tiny_llama()
    calls = calls_of(model, lambda: model(random_tokens(2, 8), use_cache=False))
    at = torch.tensor([[3, 7], [3, 7]])
    options = Options((4,), "dense", "signed", MEMORY, 0)
    with torch.no_grad():
        both = couple(calls, Connections(torch.tensor([0, 1]), (1, 1), at, at), options)
        second = couple(calls, Connections(torch.tensor([1]), (1, 1), at[1:], at[1:]), options)
    torch.testing.assert_close(both.off[:, 1:], second.off, rtol=1e-4, atol=1e-5)


def test_hooks_on_positions_see_whole_rows():
    model = tiny_llama()

    def ablate(_module, _args, output):
        output = output.clone()
        output[:, -1] = 0
        return output

    tokens = random_tokens(1, 9)
    model.model.layers[1].mlp.register_forward_hook(ablate)
    found = lsim.block_jacobians(model, tokens[0], layers=[1], positions=[8, 3])
    call = calls_of(model, lambda: model(tokens, use_cache=False))[1]
    for number, t in enumerate((8, 3)):
        expected = naive(call, 0, t, t)
        assert float((found.values[0, number] - expected).norm() / expected.norm()) < 1e-5


def test_hooks_of_a_bridge_see_whole_rows():
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = tiny_llama()
    bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)

    def ablate(x, hook):
        x = x.clone()
        x[:, -1] = 0
        return x

    tokens = random_tokens(1, 9)[0]
    with bridge.hooks([("blocks.1.hook_mlp_out", ablate)]):
        exact, near = (lsim.block_jacobians(bridge, tokens, method=method) for method in ("dense", "finite-difference"))
    assert float((exact.values - near.values)[1].norm() / near.values[1].norm()) < 3e-3


def test_hooks_that_change_what_enters_a_block_are_applied_once():
    model = tiny_llama()
    push = torch.randn(32, generator=torch.Generator().manual_seed(0))
    model.model.layers[1].register_forward_pre_hook(lambda m, a: (a[0] + push, *a[1:]))
    tokens = random_tokens(1, 9)
    found = lsim.block_jacobians(model, tokens[0], layers=[1])
    before, after = [], []
    model.model.layers[0].register_forward_hook(lambda m, a, o: before.append(o))
    with torch.no_grad():
        model(tokens, use_cache=False)
    plain = tiny_llama()
    call = calls_of(plain, lambda: plain(tokens, use_cache=False))[1]
    given = BlockCall(call.block, (before[0] + push,), dict(call.kwargs), 0, after)
    expected = naive(given, 0, 8, 8)
    assert float((found.values[0, 0] - expected).norm() / expected.norm()) < 1e-5


def test_more_copies_than_a_window_or_a_table_has_room_for():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    kinds = [[["global", "local"], 1]]
    config = GPTNeoConfig(
        vocab_size=100,
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=40,
        attention_types=kinds,
        window_size=20,
    )
    model = GPTNeoForCausalLM(config).eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.mul_(6)
    tokens = random_tokens(1, 19)
    calls = calls_of(model, lambda: model(tokens, use_cache=False))
    found = lsim.block_jacobians(model, tokens[0])
    for layer, call in enumerate(calls):
        expected = naive(call, 0, 18, 18)
        assert float((found.values[layer, 0] - expected).norm() / expected.norm()) < 1e-5


def test_krylov_of_jacobians_with_empty_rows():
    model = tiny_llama()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight[5:] = 0
            block.mlp.down_proj.weight[5:] = 0
    tokens = random_tokens(2, 9)
    dense, krylov_ = (
        lsim.analyze(model, tokens, lsim.BlockCoupling(k=4, method=m))["block_coupling"] for m in ("dense", "krylov")
    )
    torch.testing.assert_close(dense.singular_values, krylov_.singular_values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dense.values, krylov_.values, rtol=0, atol=1e-4)


def test_tokens_that_see_later_ones():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 100}
    model = ModernBertForMaskedLM(ModernBertConfig(**small, pad_token_id=0, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    tokens = random_tokens(1, 9)
    call = calls_of(model, lambda: model(tokens))[1]
    found = lsim.block_jacobians(model, tokens[0], layers=[1], positions=[(6, 3), (3, 6), 3])
    for number, pair in enumerate([(6, 3), (3, 6), (3, 3)]):
        expected = naive(call, 0, *pair)
        assert float(expected.norm()) > 1e-2
        assert float((found.values[0, number] - expected).norm() / expected.norm()) < 1e-4


def test_post_norm_blocks_that_no_name_tells():
    from transformers import BartConfig, BartForCausalLM

    small = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24, "vocab_size": 100}
    model = BartForCausalLM(BartConfig(**small)).eval()
    for method in ("dense", "finite-difference"):
        with pytest.raises(lsim.LayersimError, match="does not add to what it is given"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4, method=method))


def test_finite_differences_where_arguments_have_rows_for_heads():
    model = family("bloom", "eager")
    tokens = random_tokens(2, 7)
    exact, near = (
        lsim.analyze(model, tokens, lsim.BlockCoupling(k=4, method=m))["block_coupling"] for m in ("dense", "finite-difference")
    )
    assert float((exact.values - near.values).abs().max()) < 2e-3


def test_finite_differences_in_float64():
    tokens = random_tokens(1, 9)[0]
    exact, near = (
        lsim.block_jacobians(tiny_llama(dtype=torch.float64), tokens, method=m) for m in ("dense", "finite-difference")
    )
    assert float((exact.values - near.values).norm() / exact.values.norm()) < 1e-3


def test_finite_differences_of_what_has_no_effect():
    model = family("mistral")
    found = lsim.block_jacobians(model, random_tokens(1, 11)[0], layers=[1], positions=[(2, 9)], method="finite-difference")
    assert float(found.values.abs().max()) < 1e-2
    assert float(found.step_error.max()) < 0.1


def test_finite_differences_that_measure_rounding_are_refused():
    model = tiny_llama(dtype=torch.bfloat16)
    from tl_layersim.guards import refuse_trouble

    none = torch.zeros(2)
    refuse_trouble(none, none, torch.tensor([0.0, 0.05]), ("embed", "a", "b"))
    with pytest.raises(lsim.LayersimError, match=r"too coarse(.|\n)*b: 30%"):
        refuse_trouble(none, none, torch.tensor([0.0, 0.3]), ("embed", "a", "b"))
    assert model.dtype == torch.bfloat16


def test_under_inference_mode():
    model, tokens = tiny_llama(), random_tokens(2, 9)
    expected = lsim.analyze(model, tokens, lsim.BlockCoupling(k=4))["block_coupling"]
    with torch.inference_mode():
        assert worst(expected, lsim.analyze(model, tokens, lsim.BlockCoupling(k=4))["block_coupling"]) < 1e-6
        found = lsim.block_jacobians(model, tokens[0])
    torch.testing.assert_close(found.values, lsim.block_jacobians(model, tokens[0]).values)
    # On whole rows too, which a hook asks for.
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, o: None)
    with torch.inference_mode():
        whole = lsim.block_jacobians(model, tokens[0])
    torch.testing.assert_close(found.values, whole.values, rtol=1e-4, atol=1e-5)


def test_prompts_are_as_long_as_they_are_whichever_token_is_read():
    rows = [random_tokens(1, n, seed=n)[0] for n in (1, 3, 8)]
    found = lsim.analyze(tiny_llama(), rows, lsim.BlockCoupling(k=4, positions=(0,)))["block_coupling"]
    assert (found.lengths, found.prompts) == (("1", "2 to 3", "8 to 15"), 3)


def test_packed_rows_are_no_prompts():
    with pytest.raises(lsim.LayersimError, match=r"each row for a prompt(.|\n)*pack=False"):
        lsim.analyze(lsim.demo_model(), lsim.demo_text()[:2], lsim.BlockCoupling(), pack=True)


def test_a_window_that_copies_would_outgrow():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    small = {"vocab_size": 100, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512}
    model = GPTNeoForCausalLM(GPTNeoConfig(**small, attention_types=[[["global", "local"], 1]], window_size=24)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.mul_(6)
    tokens = random_tokens(1, 22)
    calls = calls_of(model, lambda: model(tokens, use_cache=False))
    found = lsim.analyze(model, tokens, lsim.BlockCoupling(k=4))["block_coupling"]
    assert found.whole_rows.tolist() == [0, 1]
    for layer, call in enumerate(calls):
        np.testing.assert_allclose(found.singular_values[layer], np.linalg.svd(naive(call, 0, 21, 21))[1][:4], rtol=1e-5)


def test_means_of_each_k():
    found = from_views(lsim.BlockCoupling(k=(5, 3)), [view(residuals(1)[:, :9])])
    other = ~torch.eye(3, dtype=torch.bool)
    assert found.mean(k=3) == float((1 - found.by_k[1])[other].mean())
    assert found.mean("null_coupling", k=5) == found.mean("null_coupling")
    assert abs(found.mean("null_coupling") - (1 - found.mean("null"))) < 1e-12
    with pytest.raises(lsim.LayersimError, match=r"k=7(.|\n)*one of 5, 3"):
        found.mean(k=7)
    # A larger k adds to the draws of a smaller one.
    alone = from_views(lsim.BlockCoupling(k=3), [view(residuals(1)[:, :9])])
    torch.testing.assert_close(found.null_by_k[1], alone.null)


def test_hooks_that_change_derivatives_alone_see_whole_rows():
    model, tokens = tiny_llama(), random_tokens(1, 9)
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, o: torch.cat([o[:, :-1], o[:, -1:].detach()], 1))
    found = lsim.block_jacobians(model, tokens[0], layers=[1])
    expected = naive(calls_of(model, lambda: model(tokens, use_cache=False))[1], 0, 8, 8)
    assert float((found.values[0, 0] - expected).norm() / expected.norm()) < 1e-5


def test_what_is_expensive_is_said_first(capfd):
    from dataclasses import replace

    lsim.analyze(tiny_llama(), random_tokens(1, 5), lsim.BlockCoupling(k=4))
    assert "BlockCoupling" not in capfd.readouterr().err
    lsim.analyze(tiny_llama(), random_tokens(1, 5), lsim.BlockCoupling(k=4, method="finite-difference"))
    assert "each prompt runs 64 times through every block" in capfd.readouterr().err
    large = replace(_described(), d_model=4096, layers=lsim.layer_names(32))
    assert "krylov: each prompt costs about a forward pass of 2,400 tokens." in lsim.BlockCoupling().cost(large)
    assert "dense: each prompt costs about a forward pass of 4,900 tokens, and 32" in lsim.BlockCoupling(k=50).cost(large)


def test_the_end_of_memory_is_no_reason_to_take_more(monkeypatch):
    from tl_layersim.calls import FewTokens

    def block(self, n):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(FewTokens, "block", block)
    with pytest.raises(torch.OutOfMemoryError):
        lsim.block_jacobians(tiny_llama(), random_tokens(1, 5)[0])
