"""attach: the same sums from a user's own loop, and nothing of the model changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import tl_layersim as lsim

from .conftest import random_tokens, tiny_gpt2, tiny_llama, worst
from .test_sources import bridge, nnsight

MODELS = {
    "Hugging Face": tiny_llama,
    "TransformerBridge": lambda: bridge(tiny_llama()),
    "TransformerBridge, GPT-2": lambda: bridge(tiny_gpt2()),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def analyzers():
    return [lsim.Cosine(center="none"), lsim.CKA(estimator="exact")]


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def logits(model, tokens):
    out = model(tokens)
    return out.logits if hasattr(out, "logits") else out


@each_model
def test_it_sums_what_analyze_sums(make):
    model = make()
    tokens = random_tokens(6, 15)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        for rows in tokens.split(2):
            model(rows)
    found = probe.results()
    expected = lsim.analyze(model, tokens, analyzers(), batch_size=2)
    for name in expected:
        assert worst(found[name], expected[name]) < 1e-6
        assert found[name].provenance.tokens == 90


@each_model
def test_outputs_gradients_and_hooks_are_untouched(make):
    tokens = random_tokens(2, 12)

    def step(model):
        model.zero_grad()
        out = logits(model, tokens)
        out.square().mean().backward()
        return out.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model = make()
    plain_out, plain_grads = step(model)
    # Counted after a first pass: a bridge wires hooks of its own in it.
    before = hooks(model)
    with lsim.attach(model, analyzers()) as probe:
        out, grads = step(model)
    assert torch.equal(out, plain_out)
    assert len(grads) == len(plain_grads) > 0
    assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))
    assert hooks(model) == before
    assert probe.results()["cosine"].provenance.tokens == 24


@each_model
def test_no_hook_is_left_after_an_exception(make):
    model = make()
    model(random_tokens(1, 5))
    before = hooks(model)

    def loop():
        with lsim.attach(model, analyzers()):
            model(random_tokens(1, 5))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop()
    assert hooks(model) == before


def test_a_failed_forward_pass_does_not_spoil_the_next():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    broken = [True]

    def fail(module, args):
        if broken[0]:
            raise RuntimeError("half way")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        with pytest.raises(RuntimeError, match="half way"):
            model(tokens)
        broken[0] = False
        model(tokens)
        broken[0] = True
        with pytest.raises(RuntimeError, match="half way"):
            model(tokens, attention_mask=torch.tensor([[1] * 12, [1] * 5 + [0] * 7]))
        broken[0] = False
        model(inputs_embeds=model.get_input_embeddings()(tokens)[:, :7])
    handle.remove()
    assert probe.results()["cosine"].provenance.tokens == 24 + 14


def test_generation_with_a_cache_counts_each_token_once():
    model = bridge(tiny_llama())
    with lsim.attach(model, analyzers()) as probe:
        out = model.generate(random_tokens(2, 6), max_new_tokens=7, stop_at_eos=False, verbose=False, do_sample=False)
    # The last token is generated, but never read.
    assert probe.results()["cosine"].provenance.tokens == 2 * (6 + 7 - 1)
    expected = lsim.analyze(model, out[:, :-1], analyzers())
    for name in expected:
        assert worst(probe.results()[name], expected[name]) < 1e-5


def test_single_positions_are_gathered_into_minibatches():
    model, tokens = tiny_llama(), random_tokens(1, 40)
    with torch.no_grad(), lsim.attach(model, lsim.CKA(minibatch=10)) as probe:
        past = None
        for i in range(40):
            past = model(tokens[:, i : i + 1], past_key_values=past, use_cache=True).past_key_values
    assert probe.results()["cka"].minibatches == 4


def test_mixed_precision():
    model, tokens = tiny_llama(), random_tokens(4, 12)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), lsim.attach(model, analyzers()) as probe:
        model(tokens)
        inside = probe.results()
    full = lsim.analyze(model, tokens, analyzers())
    assert 1e-7 < worst(inside["cka"], full["cka"]) < 0.05
    assert torch.allclose(inside["cosine"].values.diagonal(), torch.ones(4, dtype=torch.float64), atol=1e-6)


class Checkpointed(torch.nn.Module):
    """Blocks inside a checkpoint, as models that call `torch.utils.checkpoint` around their blocks have them."""

    def __init__(self, layers: int, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 8)
        self.parts = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.words(tokens)
        for part in self.parts:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_does_not_count_twice(layers, reentrant):
    """The backward pass runs blocks again, one by one; of a single block that looks like a whole forward pass."""
    model, tokens = Checkpointed(layers, reentrant), random_tokens(2, 12)
    paths = [f"parts.{i}" for i in range(layers)]
    with lsim.attach(model, analyzers(), layers=paths) as probe:
        model(tokens).square().mean().backward()
    assert probe.results()["cosine"].provenance.tokens == 24


@each_model
def test_gradient_checkpointing_of_a_real_layout(make):
    model, tokens = make().train(), random_tokens(2, 12)
    getattr(model, "original_model", model).gradient_checkpointing_enable()
    with lsim.attach(model, analyzers()) as probe:
        logits(model, tokens).square().mean().backward()
    assert probe.results()["cosine"].provenance.tokens == 24


@each_model
def test_a_mask_leaves_padding_out(make):
    model = make()
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 5, 7)]
    tokens, mask = torch.full((3, 9), 2), torch.zeros(3, 9, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    expected = lsim.analyze(model, rows, analyzers())
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        probe.mask = mask
        model(tokens)
    given = probe.results()
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model(tokens, attention_mask=mask.long())
    seen = probe.results()
    for name in expected:
        assert worst(given[name], expected[name]) < 1e-6
        assert worst(seen[name], expected[name]) < 1e-6


def test_a_block_that_is_run_alone_is_no_forward_pass():
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = torch.nn.Embedding(100, 8)
            self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, tokens):
            x = self.words(tokens)
            for part in self.parts:
                x = x + part(x)
            return x

    model, tokens = Own(), random_tokens(2, 12)
    layers = ["parts.0", "parts.1", "parts.2"]
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center="none"), layers=layers) as probe:
        model.parts[1](torch.ones(2, 12, 8))
        model(tokens)
        model.parts[2](torch.ones(2, 5, 8))
        model.parts[0](torch.ones(2, 5, 8))
    expected = lsim.analyze(model, tokens, lsim.Cosine(center="none"), layers=layers)
    assert worst(probe.results()["cosine"], expected["cosine"]) == 0


def test_a_mask_of_the_wrong_shape_is_refused():
    model = tiny_llama()
    with lsim.attach(model, analyzers()) as probe:
        probe.mask = torch.ones(2, 4)
        with pytest.raises(lsim.LayersimError, match=r"probe.mask does not fit(.|\n)*\(2, 4\)(.|\n)*\(2, 5\)"):
            model(random_tokens(2, 5))


def test_texts_that_the_model_pads_are_refused():
    from .conftest import tiny_tokenizer

    model = bridge(tiny_llama())
    model.tokenizer = tiny_tokenizer()
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        model("w3 w4 w5")
        with pytest.raises(lsim.LayersimError, match=r"pads texts(.|\n)*probe.mask"):
            model(["w3 w4 w5", "w6"])
    assert probe.results()["cosine"].provenance.tokens >= 3


def test_pads_that_no_mask_tells_of_are_refused():
    from .conftest import tiny_tokenizer

    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    padded = torch.tensor([[1, 5, 6, 2, 2, 2], [1, 5, 6, 7, 8, 9]])
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        with pytest.raises(lsim.LayersimError, match=r"no mask says so(.|\n)*probe.mask"):
            model(padded)
        probe.mask = padded != 2
        model(padded)
    assert probe.results()["cosine"].provenance.tokens == 9


def test_what_needs_two_passes_is_refused_with_what_does_not():
    with (
        pytest.raises(lsim.LayersimError, match=r"needs a first pass(.|\n)*Cosine\(center=\"none\"\)"),
        lsim.attach(tiny_llama(), lsim.Cosine()),
    ):
        pass
    mean = lsim.analyze(tiny_llama(), random_tokens(), "cosine")["cosine"].mean
    model = tiny_llama()
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center=mean)) as probe:
        model(random_tokens())
    assert worst(probe.results()["cosine"], lsim.analyze(model, random_tokens(), "cosine")["cosine"]) < 1e-12


def test_nothing_seen_and_not_a_number():
    model = tiny_llama()
    with lsim.attach(model, analyzers()) as probe:
        pass
    with pytest.raises(lsim.LayersimError, match=r"no forward pass went through the model"):
        probe.results()
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = float("inf")
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model(random_tokens())
    with pytest.raises(lsim.LayersimError, match=r"NaN or infinite in forward pass 1(.|\n)*blocks\.2\.hook_resid_post"):
        probe.results()


def test_nnsight_models_are_analyzed_not_attached_to():
    with pytest.raises(lsim.LayersimError, match="can be attached to"), lsim.attach(nnsight(tiny_llama()), analyzers()):
        pass


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_hooked_transformer_in_its_own_loop():
    from .test_sources import hooked_transformer

    model, tokens = hooked_transformer(tiny_gpt2()), random_tokens(2, 8)
    before = hooks(model)
    with lsim.attach(model, analyzers()) as probe:
        model(tokens, return_type="loss").backward()
        model.generate(tokens, max_new_tokens=4, stop_at_eos=False, verbose=False)
        model.run_with_cache(tokens)
    assert hooks(model) == before
    assert probe.results()["cosine"].provenance.tokens == 16 + 2 * (8 + 3) + 16


def test_asking_for_results_does_not_change_them():
    model, tokens = tiny_llama(), random_tokens(1, 40)
    quiet, asked = [], []
    for seen, ask in ((quiet, False), (asked, True)):
        with torch.no_grad(), lsim.attach(model, lsim.CKA(minibatch=16)) as probe:
            for part in tokens.split(5, dim=1):
                model(part)
                if ask and probe._tokens >= 4:
                    probe.results()
        seen.append(probe.results()["cka"])
    assert worst(quiet[0], asked[0]) == 0
    assert quiet[0].minibatches == asked[0].minibatches == 2


def test_the_stack_inside_a_model_may_be_run_too():
    model, tokens = tiny_llama(), random_tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model.model(tokens, attention_mask=mask)
        model(tokens, mask)
    assert probe.results()["cosine"].provenance.tokens == 20


def test_a_mask_that_cannot_be_read_is_refused():
    model, tokens = tiny_llama(), random_tokens(2, 6)
    four = torch.zeros(2, 1, 6, 6)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        with pytest.raises(lsim.LayersimError, match=r"cannot read from this attention mask(.|\n)*probe.mask"):
            model(tokens, attention_mask=four)
        probe.mask = torch.ones(2, 6)
        model(tokens, attention_mask=four)
    assert probe.results()["cosine"].provenance.tokens == 12


def test_rows_are_not_made_of_single_steps():
    model, tokens = tiny_llama(), random_tokens(2, 6)
    with torch.no_grad(), lsim.attach(model, lsim.CKA(level="sequence")) as probe:
        model(tokens)
        model(tokens[:, :1])
    with pytest.raises(lsim.LayersimError, match=r"whole rows was attached to single steps"):
        probe.results()


# ---- what asks the head


def lenses():
    return [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve(), lsim.Trajectory()]


@each_model
def test_the_lens_in_a_loop_equals_the_lens_of_a_run(make):
    tokens = random_tokens(4, 12)
    expected = lsim.analyze(make(), tokens, lenses(), batch_size=2)
    model = make()
    with torch.no_grad(), lsim.attach(model, lenses()) as probe:
        for part in tokens.split(2):
            model(part)
    found = probe.results()
    for name in expected:
        np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-6, atol=1e-6)


@each_model
def test_the_lens_changes_neither_outputs_nor_gradients(make):
    tokens = random_tokens(2, 12)
    plain, watched = make().train(), make().train()
    torch.manual_seed(1)
    before = logits(plain, tokens)
    before.square().mean().backward()
    torch.manual_seed(1)
    with lsim.attach(watched, lenses()):
        after = logits(watched, tokens)
        after.square().mean().backward()
    assert torch.equal(before, after)
    for (name, a), (_, b) in zip(plain.named_parameters(), watched.named_parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name


def test_the_lens_uses_the_weights_of_the_pass_and_not_of_a_later_one():
    """The optimizer changes the head before a probe that gathers tokens would have asked it."""
    model, tokens = tiny_llama(), random_tokens(2, 12)
    expected = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
    with lsim.attach(model, lsim.LogitLens()) as probe:
        model(tokens)
        with torch.no_grad():
            model.lm_head.weight.mul_(0)
    assert worst(probe.results()["logit_lens"], expected) < 1e-5


def test_the_lens_under_autocast_is_compared_with_what_autocast_explains():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    with torch.no_grad(), lsim.attach(model, lsim.Saturation()) as probe, torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens)
    assert probe.results()["saturation"].counts.sum() == 24


def test_a_head_that_says_something_else_is_refused_in_a_loop():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    model.lm_head.register_forward_hook(lambda _m, _x, out: 2 * out)
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        model(tokens)
    with pytest.raises(lsim.LayersimError, match="does not give the model's own logits"):
        probe.results()


def test_a_stack_without_its_head_cannot_be_checked():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        model.model(tokens)
    with pytest.raises(lsim.LayersimError, match=r"The head never ran(.|\n)*run the whole model once"):
        probe.results()


def test_the_lens_while_the_model_generates():
    """Single steps have a prediction and no next token yet."""
    model, tokens = tiny_llama(), random_tokens(2, 6)
    with torch.no_grad(), lsim.attach(model, [lsim.Saturation(), lsim.LogitLens()]) as probe:
        model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=2)
    found = probe.results()
    assert found["saturation"].counts.sum() == 2 * (6 + 4)
    assert (found["logit_lens"].positions, found["logit_lens"].targets) == (20, 10)


def test_labels_of_the_data_are_no_part_of_a_loop():
    model = tiny_llama()
    for labels in ("data", torch.zeros(4).long()):
        with (
            pytest.raises(lsim.LayersimError, match=r"takes its labels from the data(.|\n)*lsim.analyze"),
            lsim.attach(model, lsim.LogitLens(labels=labels)),
        ):
            pass


def test_next_tokens_survive_the_gathering_of_views():
    """Every other position counts; what follows it is attended to, and counts as its next token, in one pass or in two."""
    model, tokens = tiny_llama(), random_tokens(4, 20) % 5 + 3
    runs = []
    for parts in ([tokens], list(tokens.split(2))):
        with torch.no_grad(), lsim.attach(model, lsim.NeuralCollapse(classes=(3, 4, 5))) as probe:
            for part in parts:
                probe.mask = torch.arange(20)[None].expand(len(part), -1) % 2 == 0
                model(part, attention_mask=torch.ones_like(part))
        runs.append(probe.results()["neural_collapse"])
    assert worst(*runs) < 1e-9
    assert runs[0].samples.sum() == sum(int((tokens[:, 1::2] == c).sum()) for c in (3, 4, 5))


def transformer_lens_models():
    from .test_sources import hooked_transformer

    return {"TransformerBridge": lambda: bridge(tiny_gpt2()), "HookedTransformer": lambda: hooked_transformer(tiny_gpt2())}


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
@pytest.mark.parametrize("kind", ["TransformerBridge", "HookedTransformer"])
@pytest.mark.parametrize("way", ["run_with_hooks", "run_with_cache", "forward"])
def test_every_way_to_run_a_transformer_lens_model_is_read(kind, way):
    """Some of them call `forward` past the model's own hooks."""
    model, tokens = transformer_lens_models()[kind](), random_tokens(2, 8)
    run = {
        "run_with_hooks": lambda: model.run_with_hooks(tokens, fwd_hooks=[]),
        "run_with_cache": lambda: model.run_with_cache(tokens),
        "forward": lambda: model(tokens, return_type="loss"),
    }[way]
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        run()
    found = probe.results()["logit_lens"]
    assert (found.positions, found.targets) == (16, 14)


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_a_hooked_transformer_generates_under_the_lens():
    model, tokens = transformer_lens_models()["HookedTransformer"](), random_tokens(2, 8)
    with torch.no_grad(), lsim.attach(model, lsim.Saturation()) as probe:
        model.generate(tokens, max_new_tokens=4, stop_at_eos=False, verbose=False)
    assert probe.results()["saturation"].counts.sum() == 2 * (8 + 3)
