"""One run from end to end: what is recorded, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.core import LayerCurve
from tl_layersim.sources.hooked_module import HookedSource

from ..inputs.views import provenance, worst
from ..models.tiny_models import family, random_tokens, tiny_llama, tiny_tokenizer
from ..running.processes import finish, started
from ..running.runs import cosine_and_cka


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_batch_size_does_not_matter_where_no_minibatches_are_drawn():
    model = tiny_llama()
    data = list(random_tokens(7, 11))

    runs = [
        lsim.analyze(model, lsim.Data(data, batch_size=b), [lsim.Cosine(), lsim.CKA(estimator="exact")]) for b in (1, 3, 16)
    ]

    for name in ("cosine", "cka"):
        assert worst(runs[0][name], runs[1][name]) < 1e-6
        assert worst(runs[0][name], runs[2][name]) < 1e-6


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_provenance_says_what_was_measured_on_what():
    # A batch holds the rows of a pool, in several forward passes.
    report = lsim.analyze(tiny_llama(), lsim.Data(random_tokens(17, 11), batch_size=2, skip_first=1), cosine_and_cka())
    p = report["cka"].provenance
    assert (p.tokens, p.sequences, p.batches, p.seed) == (170, 17, 2, 0)
    assert (p.dtype, p.source) == ("torch.float32", "LlamaForCausalLM")
    assert p.options["minibatch"] == 16
    assert p.options["skip_first"] == 1
    assert set(p.versions) >= {"tl_layersim", "torch", "transformers", "nnsight"}
    assert p.seconds > 0
    assert len(p.config_hash) == 12
    assert len(p.data) == 64

    other = lsim.analyze(tiny_llama(layers=2), random_tokens(5, 11), "cka")["cka"].provenance
    assert other.config_hash != p.config_hash


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_provenance_has_the_sizes_of_attention_heads():
    """Width of a head and its rotary dimensions, as in table 1 of Brown et al. 2023; the same through TransformerLens."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    rows = torch.randint(3, 90, (4, 6))
    attention = "d_head 8, rotary_dim 2"
    result = lsim.compare(family("neox"), family("opt"), rows, lsim.CKA())
    assert result.provenance.attention == f"{attention} | d_head 8"
    assert result.transposed().provenance.attention == f"d_head 8 | {attention}"
    model = family("neox")
    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    assert lsim.analyze(bridge, rows, lsim.Cosine())["cosine"].provenance.attention == attention


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_names_stand_for_analyzers():
    assert set(lsim.analyze(tiny_llama(), random_tokens(), ["cosine", lsim.CKA()])) == {"cosine", "cka"}
    for typo in ("cosin", "cosine,cka", "CKA"):
        with pytest.raises(lsim.LayersimError, match=f"`analyzers`.*'{typo}'.* cosine,"):
            lsim.analyze(tiny_llama(), random_tokens(), typo)
    with pytest.raises(lsim.LayersimError, match="'cka' twice"):
        lsim.analyze(tiny_llama(), random_tokens(), ["cka", lsim.CKA(minibatch=8)])
    with pytest.raises(lsim.LayersimError, match="`analyzers` is empty"):
        lsim.analyze(tiny_llama(), random_tokens(), [])


@pytest.mark.parametrize("data", [[], torch.empty(0, 5, dtype=torch.long), {"input_ids": [], "attention_mask": []}])
def test_empty_data_is_refused(data):
    with pytest.raises(lsim.LayersimError, match="`data`"):
        lsim.analyze(tiny_llama(), data, cosine_and_cka())


def test_data_of_which_nothing_counts_is_refused():
    data = {"input_ids": random_tokens(), "attention_mask": torch.zeros(8, 20)}
    with pytest.raises(lsim.LayersimError, match="empty"):
        lsim.analyze(tiny_llama(), data, cosine_and_cka())
    with pytest.raises(lsim.LayersimError, match=r"`data`.*8 rows.*`skip_first`"):
        lsim.analyze(tiny_llama(), lsim.Data(random_tokens(), skip_first=20), cosine_and_cka())


def test_models_with_other_tokens_do_not_compare():
    a = tiny_llama()
    b = tiny_llama(seed=1)
    a.tokenizer, b.tokenizer = tiny_tokenizer(), tiny_tokenizer(90)
    with pytest.raises(lsim.LayersimError, match=r"'w\d+'.*LlamaForCausalLM"):
        lsim.compare(a, b, ["w3 w4 w5 w6"], "cka")

    b.tokenizer = tiny_tokenizer()
    assert lsim.compare(a, b, ["w3 w4 w5 w6"] * 4, "cka").samples == 20

    wide = transformers.LlamaForCausalLM(transformers.LlamaConfig(**a.config.to_dict() | {"vocab_size": 120}))
    with pytest.raises(lsim.LayersimError, match="100 and 120"):
        lsim.compare(a, wide, random_tokens(), "cka")
    # One tokenizer, whose vocabulary the wide model pads.
    assert lsim.compare(a, wide, lsim.Data(random_tokens(), tokenizer=a.tokenizer), "cka").samples > 0

    wide.tokenizer = a.tokenizer
    assert lsim.compare(a, wide, random_tokens(), "cka").samples > 0
    with pytest.raises(lsim.LayersimError, match=r"^Cosine .*CKA"):
        lsim.compare(a, b, ["w3 w4 w5 w6"], "cosine")


def test_wrong_types_are_refused_at_the_door():
    with pytest.raises(lsim.LayersimError, match=r"`batch_size`.*'16'"):
        lsim.analyze(tiny_llama(), lsim.Data(random_tokens(), batch_size="16"), "cka")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_weights_have_a_hash_of_their_own():
    hashes = {lsim.analyze(tiny_llama(seed=s), random_tokens(), "cka")["cka"].provenance.weights_hash for s in (0, 0, 1)}
    assert len(hashes) == 2


SETTINGS = {
    "new": "torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = 'tf32'",
    "old": "torch.set_float32_matmul_precision('medium')",
}


@pytest.mark.heavy("a process of its own")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_users_precision_setting_is_kept_and_not_used(setting, tmp_path):
    """In a process of its own: torch lets its two ways of saying it not be mixed."""
    script = (
        "import sys, torch, tl_layersim as lsim\n"
        "from tests.models.tiny_models import random_tokens, tiny_llama\n"
        "from tl_layersim.activations.view import View, reduce\n"
        f"{SETTINGS[setting]}\n"
        "mkldnn = torch.backends.mkldnn.matmul\n"
        "before, seen = mkldnn.fp32_precision, []\n"
        "def kernel(view):\n"
        "    seen.append(mkldnn.fp32_precision)\n"
        "    return {'n': torch.tensor(1)}\n"
        "view = View(torch.ones(2, 3, 4), torch.arange(3), torch.zeros(3), torch.arange(3))\n"
        "reduce({'k': kernel}, view)\n"
        "lsim.analyze(tiny_llama(), random_tokens(), 'cka')\n"
        "open(sys.argv[1], 'w').write(f'{seen} {mkldnn.fp32_precision == before}')\n"
    )
    finish(started(script, str(tmp_path / "seen")))
    assert (tmp_path / "seen").read_text() == "['ieee'] True"


def test_a_result_that_does_not_fit_its_layers_is_refused():
    names = ("a", "b", "c")
    with pytest.raises(lsim.LayersimError, match=r"values .*\(2,\).*residual.*\(3,\)"):
        LayerCurve(values=torch.zeros(2, dtype=torch.float64), layers=names, provenance=provenance())


def test_a_source_has_its_own_place():
    with pytest.raises(lsim.LayersimError, match=r"`remote` is True.*HookedSource"):
        lsim.analyze(lsim.open_model(HookedSource(tiny_llama()), remote=True), random_tokens(), "cka")

    report = lsim.analyze(HookedSource(tiny_llama()), lsim.Data(["w3 w4 w5 w6"], tokenizer=tiny_tokenizer()), "cosine")
    assert report["cosine"].provenance.tokens == 5
    with pytest.raises(lsim.LayersimError, match="`tokenizer` is 'gpt2'"):
        lsim.analyze(tiny_llama(), lsim.Data(["w3"], tokenizer="gpt2"), "cosine")


def test_a_module_without_a_mask_refuses_padding():
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(100, 8)
            self.parts = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

        def forward(self, tokens):
            return self.parts[0](self.words(tokens))

    with pytest.raises(lsim.LayersimError, match=r"Own .*`attention_mask`"):
        lsim.analyze(lsim.open_model(Own(), layers=["parts.0"]), [[3, 4, 5], [3, 4]], "cosine")
