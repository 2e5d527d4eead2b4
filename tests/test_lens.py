"""Reading heads: what each family's logits are made of, ties, masks, precision, memory; then what is made of the readings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_layersim as lsim
from tl_layersim.lens import read_lens, saturation_layers
from tl_layersim.source import NO_LABEL, reduce
from tl_layersim.unembed import Unembed

from . import oracles
from .conftest import (
    from_views,
    hidden_states,
    own_head,
    random_tokens,
    residuals,
    tiny_gpt2,
    tiny_llama,
    tiny_tokenizer,
    view,
    worst,
)
from .test_sources import CONFIGS, GROUPED, LAYOUTS, build, nnsight

LENSES = (lsim.LogitLens, lsim.Saturation, lsim.ExitCurve)


def tables(model, rows):
    """States `layer token d_model` of a model, by hooks of the test's own, and the right answers."""
    states = [hidden_states(model, row) for row in rows]
    targets = [t for row in rows for t in (*row[1:].tolist(), None)]
    return np.concatenate(states, axis=1), targets


def by_hand(model, states, norm=True):
    """`layer token vocabulary`, float64, by a copy of the model's own norm and head."""
    import copy

    twin = copy.deepcopy(model).double()
    base = twin.model if hasattr(twin, "model") else twin.transformer
    final = base.norm if hasattr(base, "norm") else base.ln_f
    out = []
    with torch.no_grad():
        for layer in range(1, len(states)):
            x = torch.as_tensor(states[layer])
            out.append(twin.lm_head(final(x) if norm or layer == len(states) - 1 else x).numpy())
    return np.stack(out)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("norm", ["final", "none"])
def test_the_lens_of_a_whole_model_equals_its_oracle(make, norm):
    model = make().double()
    rows = list(random_tokens(3, 12))
    states, targets = tables(model, rows)
    logits = by_hand(model, states, norm == "final")
    table = [[oracles.softmax(z[t]) for z in logits] for t in range(states.shape[1])]
    found = lsim.analyze(model, rows, [lsim.LogitLens(norm=norm), lsim.Saturation(norm=norm)], batch_size=1)
    lens, saturation = found["logit_lens"], found["saturation"]
    known = [t for t in range(len(targets)) if targets[t] is not None]
    for layer in range(len(logits)):
        cross_entropy = -np.mean([np.log(table[t][layer][targets[t]]) for t in known])
        agreement = np.mean([table[t][layer].argmax() == table[t][-1].argmax() for t in range(len(targets))])
        kl = np.mean([np.sum(table[t][-1] * (np.log(table[t][-1]) - np.log(table[t][layer]))) for t in range(len(targets))])
        np.testing.assert_allclose(lens.cross_entropy[layer], cross_entropy, rtol=1e-9)
        np.testing.assert_allclose(lens.agreement[layer], agreement)
        np.testing.assert_allclose(lens.kl_to_final[layer], kl, atol=1e-9)
    said = np.array([[p.argmax() for p in row] for row in table])
    first = [min(k for k in range(said.shape[1]) if (row[k:] == row[-1]).all()) for row in said]
    assert saturation.counts.tolist() == [first.count(k) for k in range(said.shape[1])]


def heads() -> dict:
    found = {name: (lambda name=name: build(name)) for name in LAYOUTS}
    for name, config in (("Gemma2", {"final_logit_softcapping": 3.0}), ("Gemma3", {"final_logit_softcapping": 2.0})):

        def capped(name=name, config=config):
            torch.manual_seed(0)
            cls = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
            return getattr(transformers, f"{name}ForCausalLM")(cls(**GROUPED, **config)).eval()

        found[f"{name} with soft-cap"] = capped
    for name, config in (("Cohere", {"logit_scale": 0.25}), ("Granite", {"logits_scaling": 4.0}), ("Phi", {}), ("Olmo2", {})):

        def other(name=name, config=config):
            torch.manual_seed(0)
            return getattr(transformers, f"{name}ForCausalLM")(
                getattr(transformers, f"{name}Config")(**GROUPED, **config, pad_token_id=0, bos_token_id=1, eos_token_id=2)
            ).eval()

        found[name] = other
    return found


HEADS = heads()


def lively(model, seed=0):
    """Norms that are not ones and a head whose logits matter, so that a wrong head cannot pass."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.5 * torch.rand(parameter.shape, generator=generator))
            elif "head" in name or "embed" in name or "wte" in name:
                parameter.mul_(8)
    return model


@pytest.mark.filterwarnings("ignore:.*trained to say the token at a masked")
@pytest.mark.parametrize("family", HEADS)
def test_the_last_layer_says_what_the_model_says(family):
    """Loss of the last layer, against the model's own; and every known layout is found without help."""
    model, tokens = lively(HEADS[family]()), random_tokens(4, 12)
    found = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
    with torch.no_grad():
        logits = model(tokens).logits
    own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    np.testing.assert_allclose(found.cross_entropy[-1], own, rtol=1e-5)
    assert found.kl_to_final[-1] == 0
    assert found.agreement[-1] == 1
    assert (found.kl_to_final[:-1] > 0).all()


@pytest.mark.filterwarnings("ignore:.*trained to say the token at a masked")
@pytest.mark.parametrize("family", ["Gemma2 with soft-cap", "Cohere", "OPT", "Bert", "GPTNeoX"])
def test_nnsight_reads_the_same_heads(family):
    tokens = random_tokens(4, 12)
    every = [cls() for cls in LENSES]
    expected = lsim.analyze(lively(HEADS[family]()), tokens, every)
    for options in ({}, {"remote": "local"}):
        found = lsim.analyze(nnsight(lively(HEADS[family]())), tokens, every, **options)
        for name in expected:
            np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-5, atol=1e-6)


def test_a_bridge_of_a_capped_model_reads_the_cap():
    from .test_sources import bridge

    tokens = random_tokens(4, 12)
    expected = lsim.analyze(lively(HEADS["Gemma2 with soft-cap"]()), tokens, lsim.LogitLens())["logit_lens"]
    model = bridge(lively(HEADS["Gemma2 with soft-cap"]()))
    found = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
    np.testing.assert_allclose(found.cross_entropy, expected.cross_entropy, rtol=1e-5)
    assert "3 tanh(" in found.unembedding


def test_a_bridge_in_compatibility_mode_still_says_what_it_says():
    from .test_sources import bridge

    model = bridge(lively(tiny_gpt2()))
    model.enable_compatibility_mode()
    tokens = random_tokens(4, 12)
    found = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
    with torch.no_grad():
        own = torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    np.testing.assert_allclose(found.cross_entropy[-1], own, rtol=1e-5)


def test_a_tied_head_and_a_head_with_a_bias():
    tied = tiny_llama()
    tied.config.tie_word_embeddings = True
    tied.lm_head.weight = tied.model.embed_tokens.weight
    biased = tiny_llama()
    biased.lm_head.bias = torch.nn.Parameter(torch.randn(100, generator=torch.Generator().manual_seed(0)))
    tokens = random_tokens(4, 12)
    for model in (tied, biased):
        with torch.no_grad():
            logits = model(tokens).logits
        own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
        found = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
        np.testing.assert_allclose(found.cross_entropy[-1], own, rtol=1e-5)


class Part(torch.nn.Linear):
    """A block that hands on the residual stream."""

    def forward(self, x):
        return x + super().forward(x)


class Odd(torch.nn.Module):
    """A layout that no table knows: its final norm is called `polish`, its head `speak`, and logits are doubled."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 16)
        self.parts = torch.nn.ModuleList(Part(16, 16) for _ in range(3))
        self.polish = torch.nn.LayerNorm(16)
        self.speak = torch.nn.Linear(16, 100)
        self.twice = twice

    def forward(self, tokens):
        x = self.words(tokens)
        for part in self.parts:
            x = part(x)
        logits = self.speak(self.polish(x))
        return 2 * logits if self.twice else logits


def test_a_head_that_no_table_knows_can_be_named():
    layers, tokens = ["parts.0", "parts.1", "parts.2"], random_tokens(4, 12)
    with pytest.raises(lsim.LayersimError, match=r"needs an unembedding(.|\n)*unembed=\['path.of.final_norm'"):
        lsim.analyze(Odd(), tokens, lsim.LogitLens(), layers=layers)
    for model in (Odd(), nnsight(Odd())):
        found = lsim.analyze(model, tokens, lsim.LogitLens(), layers=layers, unembed=["polish", "speak"])["logit_lens"]
        assert found.unembedding == "speak(polish(x))"
        assert found.provenance.options["unembed"] == ["polish", "speak"]
    with pytest.raises(
        lsim.LayersimError, match=r"no module at this path(.|\n)*unembed=\[..., 'polis'(.|\n)*did you mean 'polish'"
    ):
        lsim.analyze(Odd(), tokens, lsim.LogitLens(), layers=layers, unembed=["polis", "speak"])


@pytest.mark.parametrize("lens", LENSES)
@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["hooked", "nnsight"])
def test_a_lens_that_is_not_the_models_is_refused(lens, wrap):
    layers, tokens = ["parts.0", "parts.1", "parts.2"], random_tokens(4, 12)
    with pytest.raises(lsim.LayersimError, match=r"does not give the model's own logits(.|\n)*speak\(polish\(x\)\): off by"):
        lsim.analyze(wrap(Odd(twice=True)), tokens, lens(), layers=layers, unembed=["polish", "speak"])
    with pytest.raises(lsim.LayersimError, match=r"does not give the model's own logits(.|\n)*speak\(x\): off by"):
        lsim.analyze(wrap(Odd()), tokens, lens(), layers=layers, unembed=["speak"])


def test_a_model_without_a_head_is_refused_before_it_runs():
    model = tiny_llama().model
    for lens in LENSES:
        with pytest.raises(lsim.LayersimError, match=r"needs an unembedding(.|\n)*AutoModelForCausalLM"):
            lsim.analyze(model, random_tokens(), lens())
    assert lsim.analyze(model, random_tokens(), [lsim.Trajectory(), lsim.NeuralCollapse()])


def test_hooks_on_the_head_see_the_model_and_not_the_lens():
    model, calls = tiny_llama(), []
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    model.model.norm.register_forward_pre_hook(lambda *_: calls.append("norm"))
    lsim.analyze(model, random_tokens(4, 12), [lsim.LogitLens(), lsim.Saturation(norm="none")])
    # The one whole forward pass that compares the lens with the logits.
    assert calls == ["norm", "head"]


# ---- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_models_own(dtype):
    """Logits are what the model would give; what is made of them is float32."""
    model, tokens = tiny_llama(dtype=dtype), random_tokens(4, 12)
    with torch.no_grad():
        logits = model(tokens).logits
    assert logits.dtype == dtype
    own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    found = lsim.analyze(model, tokens, lsim.LogitLens(), batch_size=4)["logit_lens"]
    np.testing.assert_allclose(found.cross_entropy[-1], own, rtol=1e-5 if dtype == torch.float16 else 2e-2)
    assert found.kl_to_final[-1] == 0


def test_logits_that_overflow_are_named_with_their_layer():
    model = tiny_llama(dtype=torch.float16)
    with torch.no_grad():
        model.lm_head.weight.mul_(3000)
        model.model.norm.weight.mul_(3000)
    with pytest.raises(lsim.LayersimError, match=r"Logits are NaN or infinite(.|\n)*blocks\.0\.hook_resid_post(.|\n)*bfloat16"):
        lsim.analyze(model, random_tokens(4, 12), lsim.LogitLens())


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_large_logits_do_not_overflow(offset):
    """A common offset of all logits says nothing: it must change nothing."""
    x = residuals(1)
    weight = oracles.HEAD * 3
    head = torch.nn.Linear(8, oracles.WORDS, dtype=torch.float64)
    head.weight.data, head.bias.data = torch.as_tensor(weight), torch.full((oracles.WORDS,), offset, dtype=torch.float64)
    unembed = Unembed(torch.nn.LayerNorm(8, elementwise_affine=False), (head,), "every", 1.0, None, torch.float64, None, head)
    found = from_views(lsim.LogitLens(), [view(x, unembed=unembed)])
    expected = oracles.oracle_logit_lens([x], head=weight)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, atol=1e-8, rtol=1e-8, err_msg=name)


def test_ids_that_cannot_be_said_have_no_weight():
    """Vocabulary padding that is masked with -inf, and padding that simply has low logits."""
    x = residuals(2)
    expected = oracles.oracle_logit_lens([x])
    for low in (-math.inf, -1e9):
        head = torch.nn.Linear(8, oracles.WORDS + 28, dtype=torch.float64)
        head.weight.data = torch.cat([torch.as_tensor(oracles.HEAD), torch.zeros(28, 8)]).double()
        head.bias.data = torch.cat([torch.zeros(oracles.WORDS), torch.full((28,), low)]).double()
        for linear in (head, None):
            norm = torch.nn.LayerNorm(8, elementwise_affine=False)
            unembed = Unembed(norm, (head,), "every", 1.0, None, torch.float64, None, linear)
            found = from_views(lsim.LogitLens(), [view(x, unembed=unembed)])
            for name, value in expected.items():
                np.testing.assert_allclose(getattr(found, name), value, atol=1e-8, rtol=1e-8, err_msg=name)


# ---- order


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), words=st.sampled_from([5, 64, 255, 256, 257, 700]), levels=st.integers(1, 4))
def test_ties_go_to_the_lower_id(seed, words, levels):
    """Logits of a few levels only, so that nearly all of them are tied with others."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size=(6, 3, words)).astype(np.float64)  # token layer vocabulary
    target = torch.as_tensor(rng.integers(0, words, size=6))
    found = read_logits(logits, target)
    for t in range(6):
        for layer in range(3):
            z = logits[t, layer]
            order = sorted(range(words), key=lambda v, z=z: (-z[v], v))
            assert found["best"][layer, t] == order[0] == int(np.argmax(z))
            assert found["before"][layer, t] == min(order.index(int(target[t])), 10)


@pytest.mark.parametrize("top", [1, 4, 11, 12, 30])
def test_ties_over_more_groups_than_are_looked_into(top):
    """The largest logit stands once in each of many groups of 256; the target is one of them."""
    logits = np.zeros((2, 3, 256 * 40))
    places = 256 * np.arange(top) + 3
    logits[..., places] = 5.0
    for at in {0, top // 2, top - 1}:
        found = read_logits(logits, torch.tensor([places[at], places[at]]))
        assert (found["before"] == min(at, 10)).all()
        assert (found["best"] == places[0]).all()


def read_logits(logits: np.ndarray, target: torch.Tensor, memory_mb: float = 128.0) -> dict[str, torch.Tensor]:
    """`read_lens` of given logits: the residual is an index, and the head looks it up."""
    tokens, layers, words = logits.shape
    flat = torch.as_tensor(logits).reshape(-1, words)

    class Table(torch.nn.Module):
        def forward(self, x):
            return flat[x[..., 0].long()]

    index = torch.arange(tokens * layers, dtype=torch.float64).reshape(tokens, layers).T[..., None]
    residual = torch.cat([torch.zeros(1, tokens, 1, dtype=torch.float64), index])
    unembed = Unembed(None, (Table(),), "every", 1.0, None, None, None)
    one = lsim.View(residual, torch.zeros(tokens).long(), torch.zeros(tokens).long(), torch.arange(tokens), unembed=unembed)
    return read_lens(one, target, True, memory_mb, 5, "t")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), memory=st.sampled_from([0.001, 0.02, 128.0]), levels=st.sampled_from([2, 5, 1000]))
def test_walking_down_finds_what_the_full_lens_finds(seed, memory, levels):
    """Token by token, with ties and without."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size=(20, 5, 40)).astype(np.float64)
    # Half of the tokens keep their answer from some layer on.
    for t in range(0, 20, 2):
        logits[t, rng.integers(0, 5) :, 7] = levels + 1
    flat = torch.as_tensor(logits).reshape(-1, 40)

    class Table(torch.nn.Module):
        def forward(self, x):
            return flat[x[..., 0].long()]

    index = torch.arange(100, dtype=torch.float64).reshape(20, 5).T[..., None]
    residual = torch.cat([torch.zeros(1, 20, 1, dtype=torch.float64), index])
    unembed = Unembed(None, (Table(),), "every", 1.0, None, None, None)

    def fresh() -> lsim.View:
        where = torch.arange(20)
        return lsim.View(residual, where, where * 0, where, unembed=unembed)

    walked, bad = saturation_layers(fresh(), True, memory)
    assert not bad.any()
    full = fresh()
    read_lens(full, torch.full((20,), NO_LABEL), True, memory, 5, "t")
    assert torch.equal(walked, saturation_layers(full, True, memory)[0])
    said = logits.argmax(-1)
    assert walked.tolist() == [min(k for k in range(5) if (row[k:] == row[-1]).all()) for row in said]


@pytest.mark.parametrize("memory", [1e-6, 0.01, 0.1, 64])
def test_the_memory_budget_changes_no_number(memory):
    x = residuals(4, tokens=50)
    expected = from_views(lsim.LogitLens(), [view(x)])
    assert worst(from_views(lsim.LogitLens(lens_memory_mb=memory), [view(x)]), expected) < 1e-10
    assert worst(from_views(lsim.Saturation(lens_memory_mb=memory), [view(x)]), from_views(lsim.Saturation(), [view(x)])) == 0


def test_one_lens_serves_all_who_ask():
    """Three analyzers in one run ask the head as often as one."""

    def calls(analyzers) -> int:
        model, count = tiny_llama(), []
        head = model.lm_head

        class Counting(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = head.weight

            def forward(self, x):
                count.append(x.numel() // x.shape[-1])
                return torch.nn.functional.linear(x, self.weight)

        model.lm_head = Counting()
        lsim.analyze(model, random_tokens(4, 12), analyzers)
        return sum(count)

    alone = calls([lsim.LogitLens()])
    assert calls([lsim.LogitLens(), lsim.ExitCurve(), lsim.Saturation()]) == alone
    assert calls([lsim.Saturation()]) < alone
    assert calls([lsim.LogitLens(norm="none"), lsim.ExitCurve()]) > 1.5 * alone


# ---- what is right


def test_rows_of_one_token_have_no_target_and_still_a_prediction():
    model = tiny_llama()
    mixed = [torch.tensor([5]), torch.tensor([7, 9, 11])]
    found = lsim.analyze(model, mixed, [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve()])
    assert (found["logit_lens"].positions, found["logit_lens"].targets) == (4, 2)
    assert found["saturation"].counts.sum() == 4
    with pytest.raises(lsim.LayersimError, match=r"so few positions with a target"):
        lsim.analyze(model, [torch.tensor([5])], lsim.LogitLens())
    assert lsim.analyze(model, [torch.tensor([5])], lsim.Saturation())["saturation"].counts.sum() == 1


def test_a_model_of_one_block():
    found = lsim.analyze(tiny_llama(layers=1), random_tokens(4, 12), [cls() for cls in LENSES])
    assert found["logit_lens"].agreement.tolist() == [1]
    assert found["logit_lens"].monotone_share == 1
    assert found["logit_lens"].effective_depth(0) == 1
    assert found["saturation"].early_share == 0
    assert found["saturation"].cosine_to_last.tolist() == [1]
    assert (found["exit_curve"].speedup == 1).all()


def test_the_next_token_is_the_one_that_the_model_attends_to():
    """Padding is nobody's next token, nor is what follows a hole in the mask."""
    model = tiny_llama()
    tokens = random_tokens(1, 8)
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 0]])
    found = lsim.analyze(model, {"input_ids": tokens, "attention_mask": mask}, lsim.LogitLens())["logit_lens"]
    assert (found.positions, found.targets) == (5, 3)
    skipped = lsim.analyze(model, tokens, lsim.LogitLens(), skip_first=2)["logit_lens"]
    assert (skipped.positions, skipped.targets) == (6, 5)


def test_labels_in_the_data_and_labels_in_a_tensor_are_one():
    model, tokens = tiny_llama(), random_tokens(5, 9)
    shifted = torch.full_like(tokens, NO_LABEL)
    shifted[:, :-1] = tokens[:, 1:]
    plain = lsim.analyze(model, tokens, [lsim.LogitLens(), lsim.ExitCurve()], batch_size=2)
    data = {"input_ids": tokens, "labels": shifted}
    for labels, what in (("data", data), (shifted, tokens)):
        every = [lsim.LogitLens(labels=labels), lsim.ExitCurve(labels=labels)]
        found = lsim.analyze(model, what, every, batch_size=2)
        for name in plain:
            assert worst(found[name], plain[name]) == 0
    some = shifted.clone()
    some[:, ::2] = NO_LABEL
    masked = lsim.analyze(model, tokens, lsim.LogitLens(labels=some), batch_size=2)["logit_lens"]
    assert (masked.positions, masked.targets) == (45, 20)
    states, _ = tables(model, list(tokens))
    logits = by_hand(model, states)
    known = [(t, int(y)) for t, y in enumerate(some.flatten()) if y != NO_LABEL]
    own = [-np.mean([np.log(oracles.softmax(z[t])[y]) for t, y in known]) for z in logits]
    np.testing.assert_allclose(masked.cross_entropy, own, rtol=1e-5)


def test_labels_that_are_the_tokens_themselves_are_refused():
    tokens = random_tokens(3, 9)
    hf = {"input_ids": tokens, "labels": tokens.clone()}
    with pytest.raises(lsim.LayersimError, match=r"labels are the tokens themselves(.|\n)*shift labels(.|\n)*next_token"):
        lsim.analyze(tiny_llama(), hf, lsim.LogitLens(labels="data"))
    # Without being asked for they are nobody's business.
    assert lsim.analyze(tiny_llama(), hf, lsim.LogitLens())


@pytest.mark.parametrize(
    ("labels", "data", "message"),
    [
        ("data", random_tokens(3, 9), r"The data has no labels"),
        (torch.zeros(2, 9).long(), random_tokens(3, 9), r"fewer labels than(.|\n)*\(2, 9\)(.|\n)*at least 3 rows of 9"),
        (torch.zeros(3, 5).long(), random_tokens(3, 9), r"fewer labels than(.|\n)*\(3, 5\)"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels, data, message):
    for cls in (lsim.LogitLens, lsim.ExitCurve, lsim.NeuralCollapse):
        with pytest.raises(lsim.LayersimError, match=message):
            lsim.analyze(tiny_llama(), data, cls(labels=labels))
    for bad in (torch.zeros(3), ["a"], object(), torch.zeros(2, 2, 2).long(), [0.5]):
        with pytest.raises(lsim.LayersimError, match=r"Labels are whole numbers(.|\n)*torch.tensor\(labels\)"):
            lsim.LogitLens(labels=bad)
    with pytest.raises(lsim.LayersimError, match=r"no place to take labels from(.|\n)*labels='data'"):
        lsim.LogitLens(labels="label")


def test_columns_of_labels_are_read_from_tables():
    datasets = pytest.importorskip("datasets")
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    texts, label = ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11", "w3 w9"] * 3, [0, 1, 0, 1] * 3
    analyzer = lsim.NeuralCollapse(labels="data")
    table = datasets.Dataset.from_dict({"text": texts, "label": label})
    found = lsim.analyze(model, table, analyzer)["neural_collapse"]
    assert (found.labels, found.samples.tolist()) == ((0, 1), [6, 6])
    given = lsim.analyze(model, texts, lsim.NeuralCollapse(labels=torch.tensor(label)))["neural_collapse"]
    assert worst(found, given) == 0
    import pandas

    frame = lsim.analyze(model, pandas.DataFrame({"text": texts, "label": label}), analyzer)["neural_collapse"]
    assert worst(found, frame) == 0
    for other in (["a", "b"] * 6, [0.5, 1.5] * 6, [[0, 3], [1]] * 6):
        odd = datasets.Dataset.from_dict({"text": texts, "label": other})
        with pytest.raises(lsim.LayersimError, match=r"no labels that are classes|labels do not fit"):
            lsim.analyze(model, odd, analyzer)
        # Nobody who does not ask for labels is bothered with them.
        assert lsim.analyze(model, odd, lsim.Cosine(center="none"))
    with pytest.raises(lsim.LayersimError, match=r"labels do not fit the data(.|\n)*2 labels for 3 texts"):
        lsim.analyze(model, {"text": texts[:3], "label": [0, 1]}, analyzer)
    with pytest.raises(lsim.LayersimError, match=r"The data has no labels(.|\n)*pack=True"):
        lsim.analyze(model, table, analyzer, pack=True)


def classifier(family: str):
    torch.manual_seed(0)
    more = {"num_labels": 3, "pad_token_id": 2}
    if family in ("Bert", "Roberta", "MPNet"):
        small = LAYOUTS["Bert"] | more | ({"max_position_embeddings": 80, "pad_token_id": 1} if family != "Bert" else {})
        return lively(
            getattr(transformers, f"{family}ForSequenceClassification")(getattr(transformers, f"{family}Config")(**small))
        ).eval()
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**(LAYOUTS[family] | more))
    return lively(getattr(transformers, f"{family}ForSequenceClassification")(config)).eval()


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert", "Roberta", "MPNet"])
def test_classifiers_are_read_where_they_classify(family):
    model = classifier(family)
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 5, 7, 9)]
    label = torch.tensor([0, 2, 1, NO_LABEL])
    own = []
    with torch.no_grad():
        for row, y in zip(rows, label, strict=True):
            logits = model(row[None]).logits[0].double()
            own.append((float(-logits.log_softmax(0)[y]) if y != NO_LABEL else None, int(logits.argmax())))
    found = lsim.analyze(
        model, rows, [lsim.LogitLens(labels=label, top_k=(1, 2)), lsim.Saturation(), lsim.ExitCurve(labels=label)]
    )
    lens = found["logit_lens"]
    assert (lens.positions, lens.targets) == (4, 3)
    np.testing.assert_allclose(lens.cross_entropy[-1], np.mean([ce for ce, _ in own if ce is not None]), rtol=1e-5)
    right = [said == y for (_, said), y in zip(own, label.tolist(), strict=True) if y != NO_LABEL]
    assert lens.accuracy[-1] == np.mean(right)
    assert found["saturation"].counts.sum() == 4
    assert found["exit_curve"].at(1.0).accuracy == lens.accuracy[-1]
    with pytest.raises(lsim.LayersimError, match=r"classifies whole rows(.|\n)*LogitLens\(labels='data'\)"):
        lsim.analyze(model, rows, lsim.LogitLens())
    with pytest.raises(lsim.LayersimError, match="classifies whole rows"), lsim.attach(model, lsim.Saturation()):
        pass


# ---- results


def test_effective_depth():
    x = residuals(5)
    found = from_views(lsim.LogitLens(), [view(x)])
    accuracy = found.accuracy.tolist()
    for eps in (0.0, 0.3, 0.9, 0.99, 1.0):
        reached = [i + 1 for i, a in enumerate(accuracy) if a >= 1 - eps]
        assert found.effective_depth(eps) == (reached[0] if reached else len(accuracy))
    with pytest.raises(lsim.LayersimError, match="eps is a share"):
        found.effective_depth(5)


def test_fields_have_their_own_names():
    found = from_views(lsim.LogitLens(), [view(residuals(5))])
    assert torch.equal(found.cross_entropy, found.values)
    assert np.asarray(found).shape == (3,)
    table = found.to_frame()
    assert {"layer", "cross_entropy", "perplexity", "accuracy", "agreement", "kl_to_final", "entropy"} <= set(table.columns)
    assert "values" not in table.columns
    assert found.plot("cross_entropy").layout.title.text == found.plot().layout.title.text
    assert list(found.to_frame("top_k_accuracy").columns) == ["k", "layer", "top_k_accuracy"]
    with pytest.raises(lsim.LayersimError, match="no tensor field 'loss'"):
        found.plot("loss")


def test_thresholds():
    x = [residuals(6, tokens=30)]
    curve = from_views(lsim.ExitCurve(thresholds=(1, 0.5, 0, 0.5)), [view(x[0])])
    assert curve.thresholds == (0.0, 0.5, 1.0)
    assert curve.at(0).exits.tolist() == [30, 0, 0]
    assert curve.at(1).exits.tolist() == [0, 0, 30]
    assert (curve.at(0).speedup, curve.at(1).speedup, curve.at(1).agreement) == (3, 1, 1)
    assert curve.at(0.5).perplexity == curve.perplexity[1]
    expected = oracles.oracle_exit_curve(x, thresholds=(0.0, 0.5, 1.0))
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(curve, name), value, rtol=1e-9)
    assert curve.threshold_for(agreement=1.0) == 1.0
    assert curve.threshold_for(agreement=0.0) == 0.0
    with pytest.raises(lsim.LayersimError, match=r"was not measured(.|\n)*0, 0.5, 1(.|\n)*at\(0.5\), or ExitCurve"):
        curve.at(0.7)
    with pytest.raises(lsim.LayersimError, match=r"No measured threshold gives this"):
        curve.threshold_for(accuracy=1.0)
    with pytest.raises(lsim.LayersimError, match=r"agreement= or accuracy="):
        curve.threshold_for()
    for bad in ((), (1.5,), (-0.1, 0.5)):
        with pytest.raises(lsim.LayersimError, match="A threshold is a probability"):
            lsim.ExitCurve(thresholds=bad)
    with pytest.raises(lsim.LayersimError, match="k counts from 1"):
        lsim.LogitLens(top_k=(0, 5))


def test_a_threshold_is_exceeded_and_not_met():
    """Two ids with the same logit have probability 0.5 each, exactly."""
    logits = np.zeros((3, 4, 2))
    logits[:, -1, 1] = 3.0
    target = torch.tensor([1, 1, 1])
    lens = read_logits(logits, target)
    assert (lens["best_log_prob"][0].exp() == 0.5).all()
    from tl_layersim.analyzers.exit_curve import exit_kernel

    flat = torch.as_tensor(logits).reshape(-1, 2)

    class Table(torch.nn.Module):
        def forward(self, x):
            return flat[x[..., 0].long()]

    index = torch.arange(12, dtype=torch.float64).reshape(3, 4).T[..., None]
    residual = torch.cat([torch.zeros(1, 3, 1, dtype=torch.float64), index])
    where = torch.arange(3)
    unembed = Unembed(None, (Table(),), "every", 1.0, None, None, None)
    one = lsim.View(residual, where, where * 0, where, next_token=target, unembed=unembed)
    levels = torch.tensor([0.49, 0.5], dtype=torch.float64)
    out = reduce({"k": lambda v: exit_kernel(v, thresholds=levels, normed=True, labels="next_token", memory_mb=1.0)}, one)[1][
        "k"
    ]
    assert out["exits"].tolist() == [[3, 0, 0, 0], [0, 0, 0, 3]]
    # A tie goes to id 0, which is wrong here.
    assert out["correct"].tolist() == [0, 3]


def test_a_token_that_is_never_right():
    logits = np.zeros((4, 3, 30))
    logits[..., 5] = 9.0
    lens = read_logits(logits, torch.full((4,), 29))
    assert (lens["before"] == 10).all()
    assert (lens["best"] == 5).all()


def test_saturation_with_a_centre_and_without():
    x = [residuals(i, tokens=25) for i in range(3)]
    for center in ("none", "dataset"):
        found = from_views(lsim.Saturation(center=center, norm="none"), [view(b) for b in x])
        expected = oracles.oracle_saturation(x, norm=False, center=center == "dataset")
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(found, name), value, atol=1e-9, err_msg=name)


def test_saturation_of_a_zero_residual_is_refused():
    x = residuals(0)
    x[1:, 3] = 0
    with pytest.raises(lsim.LayersimError, match="cosine of a zero vector"):
        from_views(lsim.Saturation(), [view(x)])


def test_what_is_saved_can_be_resumed(tmp_path):
    model, tokens = tiny_llama(), random_tokens(12, 9)
    every = [lsim.LogitLens(), lsim.Saturation(center="dataset"), lsim.ExitCurve(), lsim.Trajectory(), lsim.NeuralCollapse()]
    whole = lsim.analyze(model, tokens, every, batch_size=3)

    class Stop(Exception):
        pass

    class Cut(list):
        def __iter__(self):
            for i, row in enumerate(super().__iter__()):
                if i == 7 and self.armed:
                    raise Stop
                yield row

    rows = Cut(list(tokens))
    rows.armed = True
    path = tmp_path / "run.part"
    with pytest.raises(Stop):
        lsim.analyze(model, rows, every, batch_size=3, checkpoint=path)
    rows.armed = False
    resumed = lsim.analyze(model, rows, every, batch_size=3, checkpoint=path)
    for name in whole:
        assert worst(resumed[name], whole[name]) == 0


def test_own_heads_are_checked_in_the_oracles_tests_too():
    unembed = own_head()
    x = torch.as_tensor(residuals(0)[2])
    expected = oracles.layer_norm(x.numpy()) @ oracles.HEAD.T
    np.testing.assert_allclose(unembed(x).detach(), expected, atol=1e-12)
    spare = torch.empty(40, oracles.WORDS, dtype=torch.float64)
    with torch.no_grad():
        np.testing.assert_allclose(unembed(x, True, spare), expected, atol=1e-12)


def test_a_label_that_cannot_be_said_has_no_probability():
    logits = np.zeros((2, 3, 40))
    logits[:, 0, 7] = -np.inf
    found = read_logits(logits, torch.tensor([7, 7]))
    assert found["target_log_prob"][0].isneginf().all()
    np.testing.assert_allclose(found["target_log_prob"][1:], -np.log(40))
    np.testing.assert_allclose(found["entropy"][0], np.log(39))


@pytest.mark.parametrize("label", [100, -1])
def test_labels_outside_the_head_are_refused(label):
    labels = torch.full((4, 12), 5)
    labels[:, ::2] = label
    labels[:, 1::4] = label
    with pytest.raises(lsim.LayersimError, match=rf"head cannot say(.|\n)*from {label} to {label}(.|\n)*0 to 99"):
        lsim.analyze(tiny_llama(), random_tokens(4, 12), lsim.LogitLens(labels=labels))


@pytest.mark.filterwarnings("ignore:labels has")
def test_labels_follow_the_rows_and_positions_of_the_users_data():
    """Rows without tokens, padding on the left and rows that are split do not shift labels by row."""
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    texts, label = ["w3 w4 w5", "w6 w7", "w8 w9 w10 w11", "w3 w9"] * 3, torch.tensor([0, 1, 0, 1] * 3)
    plain = lsim.analyze(model, texts, lsim.NeuralCollapse(labels=label))["neural_collapse"]
    empty = torch.cat([torch.tensor([5]), label])
    assert worst(lsim.analyze(model, ["", *texts], lsim.NeuralCollapse(labels=empty))["neural_collapse"], plain) == 0

    tokens = random_tokens(3, 8)
    shifted = torch.full_like(tokens, NO_LABEL)
    shifted[:, :-1] = tokens[:, 1:]
    plain = lsim.analyze(model, tokens, lsim.LogitLens(labels=shifted))["logit_lens"]
    pad, none = torch.zeros(3, 4).long(), torch.full((3, 4), NO_LABEL)
    mask = torch.cat([pad, torch.ones(3, 8).long()], 1)
    left = {"input_ids": torch.cat([pad, tokens], 1), "attention_mask": mask}
    for what, labels in (
        (left, torch.cat([none, shifted], 1)),
        (
            {"input_ids": torch.cat([tokens[:1], tokens]), "attention_mask": torch.tensor([[0] * 8] + [[1] * 8] * 3)},
            torch.cat([shifted[:1], shifted]),
        ),
    ):
        assert worst(lsim.analyze(model, what, lsim.LogitLens(labels=labels))["logit_lens"], plain) < 1e-12
        assert worst(lsim.analyze(nnsight(model), what, lsim.LogitLens(labels=labels))["logit_lens"], plain) < 1e-5
    split = lsim.analyze(model, tokens, lsim.LogitLens(labels=shifted), seq_len=4)["logit_lens"]
    assert split.targets == plain.targets
    with pytest.raises(lsim.LayersimError, match=r"joined have no row"):
        lsim.analyze(model, texts, lsim.LogitLens(labels=label), pack=True)


def test_a_missing_label_is_none_whatever_the_batch():
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    data = [{"text": t, "label": y} for t, y in zip(["w3 w4 w5", "w6 w7", "w8 w9", "w3 w9"], [0, None, 1, 1], strict=True)]
    found = [
        lsim.analyze(model, data, lsim.NeuralCollapse(labels="data"), batch_size=b)["neural_collapse"].samples.tolist()
        for b in (1, 2, 4)
    ]
    assert found == [[2, 1]] * 3


def test_a_sure_layer_is_never_surer_than_one():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(200, 3, 300)) - 25).astype(np.float32)
    logits[np.arange(200)[:, None], np.arange(3), rng.integers(0, 300, size=(200, 3))] = rng.uniform(-1, 1, size=(200, 3))
    lens = read_logits(logits, torch.zeros(200).long())
    assert (lens["best_log_prob"] <= 0).all()
    assert (lens["target_log_prob"] <= 0).all()


@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["hooked", "nnsight"])
def test_every_lens_refuses_logits_that_are_not_finite(wrap):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    for lens in LENSES:
        with pytest.raises(lsim.LayersimError, match=r"Logits are NaN or infinite"):
            lsim.analyze(wrap(model), random_tokens(4, 12), lens())
    with pytest.raises(lsim.LayersimError, match=r"Logits are NaN or infinite"):
        lsim.prediction_grid(wrap(model), random_tokens(1, 12)[0])


def test_a_layer_that_excludes_what_the_last_allows_is_infinitely_far():
    logits = np.zeros((2, 3, 40))
    logits[:, 0, 7] = -np.inf
    assert read_logits(logits, torch.tensor([1, 1]))["kl"].tolist() == [[math.inf] * 2, [0.0] * 2, [0.0] * 2]


@pytest.mark.parametrize("factor", [1.05, 0.9])
def test_in_half_precision_a_head_that_is_five_percent_off_is_refused(factor):
    model, tokens = tiny_llama(dtype=torch.bfloat16), random_tokens(2, 12)
    assert lsim.analyze(model, tokens, lsim.Saturation())
    model.lm_head.register_forward_hook(lambda _m, _x, out: factor * out)
    with pytest.raises(lsim.LayersimError, match="does not give the model's own logits"):
        lsim.analyze(model, tokens, lsim.Saturation())


@pytest.mark.parametrize("family", ["Bert", "Llama", "GPT2"])
def test_token_classifiers_are_read_at_every_token(family):
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**(LAYOUTS[family] | {"num_labels": 3}))
    model = lively(getattr(transformers, f"{family}ForTokenClassification")(config)).eval()
    rows = [torch.tensor([5]), *random_tokens(2, 9)]
    labels = torch.randint(0, 3, (3, 9), generator=torch.Generator().manual_seed(0))
    found = lsim.analyze(model, rows, lsim.LogitLens(labels=labels, top_k=(1,)))["logit_lens"]
    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits[0] for row in rows]).double()
    own = torch.nn.functional.cross_entropy(logits, torch.cat([labels[0, :1], labels[1], labels[2]]))
    np.testing.assert_allclose(found.cross_entropy[-1], own, rtol=1e-5)
    assert found.positions == 19


def test_a_head_that_cannot_be_called_as_found_is_refused():
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**LAYOUTS["Bert"])).eval()
    with pytest.raises(lsim.LayersimError, match=r"own logits(.|\n)*cannot be called so(.|\n)*pooled_output(.|\n)*unembed="):
        lsim.analyze(model, random_tokens(2, 9), lsim.Saturation())
    assert lsim.analyze(model, random_tokens(2, 9), lsim.Saturation(), unembed=["cls.predictions"])


def test_the_opt_that_projects_out_without_a_norm():
    torch.manual_seed(0)
    more = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**(LAYOUTS["OPT"] | more))).eval()
    found = lsim.analyze(lively(model), random_tokens(2, 9), lsim.LogitLens())["logit_lens"]
    assert found.unembedding == "lm_head(model.decoder.project_out(x))"


def test_a_norm_in_another_dtype_than_the_head():
    model = tiny_gpt2().to(torch.bfloat16)
    head = model.lm_head

    class Upcast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(head.weight.detach().float())

        def forward(self, x):
            return torch.nn.functional.linear(x.float(), self.weight)

    model.lm_head = Upcast()
    assert lsim.analyze(model, random_tokens(2, 9), lsim.LogitLens())


def test_masked_models_are_not_asked_for_the_next_token_in_silence():
    model = build("Bert")
    with pytest.warns(lsim.LayersimWarning, match="trained to say the token at a masked position"):
        lsim.analyze(model, random_tokens(2, 9), lsim.LogitLens())


@pytest.mark.parametrize("memory", [0, -1, math.inf, math.nan])
def test_a_budget_that_is_none_is_refused(memory):
    for lens in LENSES:
        with pytest.raises(lsim.LayersimError, match="Logits need some memory"):
            lens(lens_memory_mb=memory)


@pytest.mark.parametrize("offset", [-101.0, -75.0, 70.0, 85.0])
def test_float32_keeps_its_digits_near_overflow_and_underflow(offset):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 3, 200))
    target = torch.arange(5)
    exact, found = read_logits(logits, target), read_logits((logits + offset).astype(np.float32), target)
    for name in ("best_log_prob", "target_log_prob", "entropy", "kl"):
        np.testing.assert_allclose(found[name], exact[name], atol=2e-4, err_msg=name)


def test_what_is_shared_is_what_each_would_find_alone():
    """More ranks than another asked for, another norm, other labels: none of them is taken from what is not theirs."""
    model, tokens = lively(tiny_llama()), random_tokens(4, 12)
    every = [lsim.ExitCurve(), lsim.LogitLens(top_k=(1, 20), norm="none"), lsim.Saturation(norm="none")]
    together = lsim.analyze(model, tokens, every)
    swapped = lsim.analyze(model, tokens, [lsim.ExitCurve(), lsim.LogitLens(top_k=(1, 20)), lsim.Saturation()])
    for analyzer in every:
        alone = lsim.analyze(model, tokens, analyzer)[analyzer.name]
        assert worst(together[analyzer.name], alone) < 1e-5
    assert worst(swapped["logit_lens"], lsim.analyze(model, tokens, lsim.LogitLens(top_k=(1, 20)))["logit_lens"]) < 1e-5
    mixed = lsim.analyze(model, tokens, [lsim.LogitLens(), lsim.Saturation(norm="none")])["saturation"]
    assert torch.equal(mixed.counts, together["saturation"].counts)
    assert not torch.equal(mixed.counts, swapped["saturation"].counts)


def test_a_probability_that_stays_does_not_rise():
    x = np.repeat(residuals(1)[-1:], 4, axis=0)
    found = from_views(lsim.LogitLens(), [view(x)])
    assert found.monotone_share == 0
    assert (found.agreement == 1).all()


def test_a_lucky_threshold_below_a_bad_one_is_not_chosen():
    curve = from_views(lsim.ExitCurve(thresholds=(0.1, 0.5, 1.0)), [view(residuals(6))])
    import dataclasses

    agreement, accuracy = (torch.tensor(x, dtype=torch.float64) for x in ([0.96, 0.5, 1.0], [0.3, 0.4, 0.2]))
    odd = dataclasses.replace(curve, agreement=agreement, accuracy=accuracy)
    assert odd.threshold_for(agreement=0.95) == 1.0
    assert odd.threshold_for(agreement=0.4) == 0.1
    assert odd.threshold_for(agreement=0.4, accuracy=0.2) == 0.1


def test_what_a_lens_calls_has_neither_hooks_nor_dropout():
    from tl_layersim.sources.hooked import _Quiet

    head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)).train()
    x, calls = torch.ones(3, 8), []
    head[1].register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    first, again = _Quiet(head)(x), _Quiet(head)(x)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert head[0].training
    head(x)
    assert calls == [1]
    head[1].register_forward_pre_hook(lambda *_: 1 / 0)
    _Quiet(head)(x)
    with pytest.raises(RuntimeError):
        _Quiet(head)(torch.ones(3, 7))
    assert head[0].training
    with pytest.raises(ZeroDivisionError):
        head(x)


def test_a_source_that_names_no_next_token_is_read_from_neighbours():
    from tl_layersim.labels import targets

    tokens, row = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 0, 0, 1, 1])
    one = lsim.View(torch.zeros(2, 5, 3), tokens, row, torch.tensor([0, 1, 3, 0, 1]))
    assert targets(one, "next_token").tolist() == [6, NO_LABEL, NO_LABEL, 9, NO_LABEL]


def test_labels_options_and_classes_as_users_have_them():
    import pandas

    wanted = torch.tensor([[1, 2], [3, 4]])
    for what in (wanted.tolist(), wanted.numpy(), pandas.DataFrame(wanted.numpy()), wanted):
        assert torch.equal(lsim.LogitLens(labels=what).labels, wanted)
    assert lsim.LogitLens(top_k=5).top_k == (5,)
    assert lsim.LogitLens(top_k=[1, 3]).top_k == (1, 3)
    assert lsim.ExitCurve(thresholds=0.9).thresholds == (0.9,)
    assert lsim.NeuralCollapse(classes=[1, 2]).classes == (1, 2)


def test_a_class_of_a_row_is_no_token():
    model, tokens = tiny_llama(), random_tokens(4, 12)
    for analyzer in (lsim.LogitLens, lsim.ExitCurve):
        with pytest.raises(lsim.LayersimError, match=r"one class for a whole row(.|\n)*AutoModelForSequenceClassification"):
            lsim.analyze(model, tokens, analyzer(labels=[0, 1, 0, 1]))
    assert lsim.analyze(model, tokens, lsim.NeuralCollapse(labels=[0, 1, 0, 1]))


def test_a_table_of_labels_that_is_too_long_is_mentioned():
    tokens = random_tokens(4, 12)
    with pytest.warns(lsim.LayersimWarning, match="labels has 5 rows, and 4 rows of data were read"):
        lsim.analyze(tiny_llama(), tokens, lsim.NeuralCollapse(labels=[0, 1, 0, 1, 1]))


def test_a_grid_as_a_table():
    grid = lsim.prediction_grid(tiny_llama(), random_tokens(1, 9)[0])
    table = grid.to_frame()
    assert list(table.columns) == ["position", "token", "layer", "probability", "word", "final"]
    assert table[table.layer == "blocks.2.hook_resid_post"].final.all()
    assert table.word.tolist() == [word for row in grid.words for word in row]
    assert list(grid.to_frame("saturation_layer").columns) == ["token", "saturation_layer"]


def test_a_later_token_with_low_logits_is_read_as_well_as_the_first():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 3, 200))
    low = logits.copy()
    low[1:] -= 101
    exact, found = read_logits(logits, torch.arange(5)), read_logits(low.astype(np.float32), torch.arange(5))
    for name in ("best_log_prob", "target_log_prob", "entropy", "kl"):
        np.testing.assert_allclose(found[name], exact[name], atol=2e-4, err_msg=name)
