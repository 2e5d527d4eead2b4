"""How often a call reads its data, and what happens to data that can be read only once."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tl_layersim as lsim
from tl_layersim.data import batches
from tl_layersim.data import data as kept_rows
from tl_layersim.remote.open_model import open_source
from tl_layersim.sources.hooked_module import HookedSource
from tl_layersim.sources.kept_activations import KeptActivations
from tl_layersim.sources.source import CanReadSites

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer

SOURCES = {
    "one pass": [lsim.Cosine(center="none"), lsim.CKA(minibatch=16)],
    "two passes": [lsim.Cosine(), lsim.CKA(minibatch=16)],
    "first pass without the model": [lsim.NeuralCollapse(classes=4)],
    "every first pass": [lsim.Cosine(), lsim.NeuralCollapse(classes=4), lsim.Saturation(center="dataset")],
}


class Counted:
    """Rows that count how often they are iterated over."""

    def __init__(self, rows) -> None:
        self.rows, self.reads = rows, 0

    def __iter__(self):
        self.reads += 1
        return iter(self.rows)


class StopAt:
    """A context in which a forward pass of a model is interrupted."""

    def __init__(self, model, number):
        self.model, self.left = model, number

    def __enter__(self):
        self.handle = self.model.model.layers[0].register_forward_pre_hook(self.count)

    def count(self, *_):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def __exit__(self, *_):
        self.handle.remove()


class Fickle:
    """Other rows each time."""

    seed = 0

    def __iter__(self):
        self.seed += 1
        return iter(random_tokens(seed=self.seed))


def keep_at_most(monkeypatch, size):
    for module in (batches, kept_rows):
        monkeypatch.setattr(module, "MOST_KEPT", size)


@pytest.fixture
def no_cache(monkeypatch):
    keep_at_most(monkeypatch, 1000)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_analyze_and_compare_read_their_data_once():
    data = Counted(list(random_tokens()))
    lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=2), SOURCES["every first pass"])
    assert data.reads == 1
    lsim.compare(tiny_llama(), tiny_llama(seed=1), lsim.Data(data, batch_size=2), lsim.CKA(minibatch=16))
    assert data.reads == 2


def test_data_above_the_limit_is_read_for_each_pass_with_the_same_numbers(no_cache):
    data = Counted(list(random_tokens()))
    twice = lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=2), lsim.Cosine())
    assert data.reads == 2

    once = lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=2), lsim.Cosine(center="none"))
    assert data.reads == 3
    assert once["cosine"].provenance.data == twice["cosine"].provenance.data


@pytest.mark.light("one pass", "every first pass")
@pytest.mark.parametrize("analyzers", SOURCES.values(), ids=SOURCES)
def test_kept_batches_give_the_same_report_as_batches_that_are_read_again(analyzers, monkeypatch):
    model = tiny_llama()
    texts = ["w3 w4 w5 w6 w7 w8 w9", "w1 w8 w9", "w5 w6 w7 w3", "w4 w4 w5", "w3 w6 w5 w4 w9 w4"] * 3
    model.tokenizer = tiny_tokenizer()
    options = {"batch_size": 4, "seq_len": 5, "skip_first": 1, "max_tokens": 40}
    from_memory = lsim.analyze(model, lsim.Data(texts, **options), analyzers)
    keep_at_most(monkeypatch, 0)

    from_source = lsim.analyze(model, lsim.Data(texts, **options), analyzers)

    for name in from_memory:
        assert worst(from_memory[name], from_source[name]) == 0
        assert from_memory[name].provenance.data == from_source[name].provenance.data
        assert from_memory[name].provenance.options == from_source[name].provenance.options


def test_a_resumed_run_reads_its_data_once(tmp_path):
    data = Counted(list(random_tokens()))
    path = tmp_path / "run"
    for reads in (1, 2):
        lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=2), lsim.Cosine(), checkpoint=path)
        assert data.reads == reads


def test_a_generator_may_need_several_passes_where_its_rows_fit():
    analyzers = SOURCES["every first pass"]
    generator = (row for row in random_tokens())

    of_generator = lsim.analyze(tiny_llama(), generator, analyzers)
    of_rows = lsim.analyze(tiny_llama(), random_tokens(), analyzers)

    for name in of_generator:
        assert worst(of_generator[name], of_rows[name]) == 0


def test_a_generator_is_not_read_on_where_another_pass_stopped():
    data = lsim.Data((row for row in random_tokens(80, 6)), batch_size=2)
    model = tiny_llama()
    with pytest.raises(KeyboardInterrupt), StopAt(model, 3):
        lsim.analyze(model, data, lsim.Cosine(center="none"))
    with pytest.raises(lsim.LayersimError, match="`data` is a generator"):
        lsim.analyze(model, data, lsim.Cosine(center="none"))


def test_a_list_that_grew_is_read_anew():
    rows = list(random_tokens(8, 6))
    model = tiny_llama()
    data = lsim.Data(rows)
    lsim.analyze(model, data, "cosine")
    rows.append(rows[0])

    assert lsim.analyze(model, data, "cosine")["cosine"].provenance.sequences == 9


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_tensor_that_was_changed_in_place_is_read_anew():
    rows = random_tokens(4, 12)
    model = tiny_llama()
    data = lsim.Data(rows, positions=lambda ids: ids > 50)
    lsim.analyze(model, data, "cosine")
    rows[:] = rows.flip(1)

    anew = lsim.analyze(model, lsim.Data(rows.clone(), positions=lambda ids: ids > 50), "cosine")["cosine"]

    assert worst(lsim.analyze(model, data, "cosine")["cosine"], anew) == 0


def test_a_generator_above_the_limit_has_no_second_pass(no_cache):
    with pytest.raises(
        lsim.LayersimError,
        match=r"`data`.*Cosine .*1\.0 kB.*list\(data\).*Cosine\(center=\"none\"\)",
    ):
        lsim.analyze(tiny_llama(), lsim.Data((row for row in random_tokens()), batch_size=2), "cosine")

    of_generator = lsim.analyze(tiny_llama(), (row for row in random_tokens()), lsim.Cosine(center="none"))
    of_rows = lsim.analyze(tiny_llama(), random_tokens(), lsim.Cosine(center="none"))
    assert worst(of_generator["cosine"], of_rows["cosine"]) == 0


def test_a_generator_above_the_limit_is_refused_before_the_rest_is_read(no_cache):
    reads = []
    with pytest.raises(lsim.LayersimError, match="can be read only once"):
        lsim.analyze(
            tiny_llama(),
            lsim.Data((reads.append(1) or row for row in torch.randint(3, 100, (1000, 20))), batch_size=2),
            "cosine",
        )
    assert len(reads) < 100


def test_data_above_the_limit_that_is_gone_or_other_on_the_second_pass_is_noticed(no_cache):
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\b160 .*\b0 "):
        lsim.analyze(tiny_llama(), [iter(random_tokens())], "cosine")
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\b160 .*\b160 "):
        lsim.analyze(tiny_llama(), Fickle(), "cosine")


def test_data_that_changes_is_read_once_where_it_fits():
    changing = lsim.analyze(tiny_llama(), Fickle(), "cosine")
    fixed = lsim.analyze(tiny_llama(), random_tokens(seed=1), "cosine")
    assert worst(changing["cosine"], fixed["cosine"]) == 0


def forward_passes(model, data, analyzers, **options):
    """The number of forward passes over all rows, and the report."""
    rows = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda _module, args: rows.append(len(args[0])))
    report = lsim.analyze(model, data, analyzers, **options)
    handle.remove()
    return sum(count > 1 for count in rows), report


def results_are_equal(report, expected):
    for name, result in report.items():
        for field, value in vars(result).items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, getattr(expected[name], field), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("intervals", [False, True])
def test_data_of_one_forward_pass_runs_once_with_the_numbers_of_two(intervals, monkeypatch):
    analyzers = [lsim.Cosine(), lsim.Saturation(center="dataset")]
    data = lsim.Data(random_tokens(16), batch_size=16)
    count, report = forward_passes(tiny_llama(), data, analyzers, intervals=intervals)
    monkeypatch.setattr(HookedSource, "run", CanReadSites.run)
    count_of_two, report_of_two = forward_passes(tiny_llama(), data, analyzers, intervals=intervals)

    assert count == count_of_two - 1
    results_are_equal(report, report_of_two)


class OtherNormLlama(LlamaForCausalLM):
    """A Llama whose last norm is not `model.norm`, as its place suggests, but one beside it."""

    def __init__(self, config):
        super().__init__(config)
        generator = torch.Generator().manual_seed(1)
        self.model.other_norm = LlamaRMSNorm(config.hidden_size)
        self.model.register_module("norm", LlamaRMSNorm(config.hidden_size))
        for norm in (self.model.norm, self.model.other_norm):
            torch.nn.init.normal_(norm.weight, generator=generator)

    def forward(self, input_ids=None, attention_mask=None, use_cache=False, **options):
        hidden = self.model.embed_tokens(input_ids)
        rotation = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        for block in self.model.layers:
            hidden = block(hidden, position_embeddings=rotation, attention_mask=None)
        return CausalLMOutput(logits=self.lm_head(self.model.other_norm(hidden)))


def test_the_head_is_chosen_before_activations_of_the_first_pass_are_read_again():
    rows = random_tokens(8)
    model = OtherNormLlama(tiny_llama().config).eval()

    # These sites leave the choice of the head to the check before the main pass.
    report = lsim.analyze(model, lsim.Data(rows), [lsim.Contribution(), lsim.Cosine(), lsim.LogitLens()])

    logits = model(input_ids=rows).logits.double()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    torch.testing.assert_close(report["logit_lens"].values[-1], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("analyzers", "batch_size"), [([lsim.Cosine()], 4), ([lsim.BlockCoupling(k=2), lsim.Cosine()], 8)])
def test_more_data_and_calls_of_blocks_run_twice(analyzers, batch_size, monkeypatch):
    data = lsim.Data(random_tokens(8, 6), batch_size=batch_size)
    count, report = forward_passes(tiny_llama(), data, analyzers)
    monkeypatch.setattr(HookedSource, "run", CanReadSites.run)
    count_of_two, report_of_two = forward_passes(tiny_llama(), data, analyzers)

    assert count == count_of_two
    results_are_equal(report, report_of_two)


def test_other_rows_on_the_second_pass_run_and_are_refused(no_cache):
    keep = KeptActivations()
    batches_of = [batch_of(random_tokens(8, seed=seed)) for seed in (0, 0, 1)]
    view = object()
    keep.keep(batches_of[0], view)

    assert keep.of(batches_of[1]) is view
    assert keep.of(batches_of[2]) is None
    # What other rows have taken the place of is not kept.
    assert keep.of(batches_of[0]) is None
    with pytest.raises(lsim.LayersimError, match="data"):
        lsim.analyze(tiny_llama(), lsim.Data(Fickle(), batch_size=8), lsim.Cosine())


def batch_of(rows):
    """The one batch of some rows."""
    [batch] = batches.Batches(lsim.Data(rows, batch_size=8), open_source(tiny_llama()).model)
    return batch
