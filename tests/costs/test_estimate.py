"""`estimate`: FLOPs and bytes beside torch's own counts and real sums, with and without weights; images."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tl_layersim as lsim
from tl_layersim.core.sums import SumTree
from tl_layersim.costs.estimate import MeteredBatch, OperationMeter
from tl_layersim.lens.statistics import GROUP_SIZE

from ..models.input_models import image_vit
from ..models.tiny_models import tiny_gpt2, tiny_llama

SIZE = {"batch_size": 2, "seq_len": 16}
SETS = {
    "residual stream": [lsim.Cosine(), lsim.CKA(minibatch=16)],
    "lens": [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve()],
    "blocks called again": [lsim.BlockCoupling(), lsim.SkipEffect()],
    "moments and a first pass": [lsim.EffectiveRank(), lsim.Trajectory(), lsim.LinearProbe()],
}


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch):
    monkeypatch.setattr("tl_layersim.costs.estimate.CALIBRATION", 0.0)


def config_of(model):
    return model.config.to_dict() | {"dtype": "float32", "architectures": None}


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("analyzers", SETS.values(), ids=SETS)
def test_a_configuration_gives_the_costs_of_the_model_with_weights(analyzers):
    model = tiny_llama(layers=2)
    real = lsim.estimate(model, analyzers, tokens=1000, **SIZE)
    meta = lsim.estimate(config_of(model), analyzers, tokens=1000, **SIZE)
    assert meta.sums_bytes == real.sums_bytes
    weights = [*model.parameters(), *model.buffers()]
    assert meta.weights_bytes == real.weights_bytes == sum(tensor.numel() * 4 for tensor in weights)
    assert (meta.passes, meta.sites) == (real.passes, real.sites)
    assert meta.flops["forward"] == real.flops["forward"]
    assert meta.flops.keys() == real.flops.keys()
    for part, flops in real.flops.items():
        assert 1 / 1.5 < meta.flops[part] / flops < 1.5, part
    assert 1 / 1.5 < meta.activations_bytes / real.activations_bytes < 1.5
    assert meta.seconds is None
    assert real.seconds > 0


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_vocabulary_of_whole_groups_needs_no_weights():
    config = config_of(tiny_llama()) | {"vocab_size": 2 * GROUP_SIZE}
    cost = lsim.estimate(config, [lsim.LogitLens()], tokens=32, **SIZE)
    assert cost.flops["head"] == 3 * 2 * 32 * 32 * 2 * GROUP_SIZE


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:Intervals of 'cka' rest on")
@pytest.mark.parametrize(("pools", "intervals"), [(1, False), (7, False), (8, False), (8, True), (37, True)])
def test_bytes_of_sums_are_the_most_that_a_run_holds(monkeypatch, pools, intervals):
    held, add = Counter(), SumTree.add

    def noting(self, more):
        for kernel in more.sums:
            own = (value for node in (*self.nodes, more) for value in node.sums[kernel].fields.values())
            held[kernel] = max(held[kernel], sum(value.nbytes for value in own))
        return add(self, more)

    monkeypatch.setattr(SumTree, "add", noting)
    model = tiny_llama()
    tokens = torch.randint(model.config.vocab_size, (16 * pools, 16), generator=torch.Generator().manual_seed(0))
    lsim.analyze(model, lsim.Data(tokens, batch_size=8), [lsim.CKA(minibatch=16)], intervals=intervals)
    cost = lsim.estimate(model, [lsim.CKA(minibatch=16)], tokens=16 * 16 * pools, batch_size=8, seq_len=16, intervals=intervals)
    if intervals:
        # From which runs with intervals see whether texts are in order.
        assert 1 <= cost.sums_bytes["order of texts"] / held.pop("order of texts") <= 1.5
    # Of the measure and of the sizes of activations that it rests on.
    assert len(held) == 2
    assert list(cost.sums_bytes) == ["cka", "order of texts"][: 1 + intervals]
    # With intervals, kernels have most blocks at different times.
    assert 1 <= cost.sums_bytes["cka"] / sum(held.values()) <= (1.5 if intervals else 1)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_sums_of_a_first_pass_are_held_in_pairs_too():
    # Of 8 leaves, those of 4 nodes are held at most: 4, 2 and 1 of them, and the one that is added.
    one, eight = (
        lsim.estimate(config_of(tiny_llama()), [lsim.Cosine()], tokens=16 * 16 * leaves, batch_size=16, seq_len=16)
        for leaves in (1, 8)
    )
    assert one.passes == 2
    assert eight.sums_bytes["cosine"] == 4 * one.sums_bytes["cosine"]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_pool_of_many_batches_costs_each_of_them_a_part():
    # Minibatches of 64 samples are 4 rows: two batches of 2 rows, or one of 4.
    small, large = (
        lsim.estimate(config_of(tiny_llama()), [lsim.CKA(minibatch=64)], tokens=640, batch_size=rows, seq_len=16)
        for rows in (2, 4)
    )
    assert small.flops == pytest.approx(large.flops)


def test_the_passes_of_a_run_are_not_in_memory_together():
    twice, once = (
        lsim.estimate(tiny_llama(), [lsim.Saturation(center=center)], tokens=32, **SIZE) for center in ("dataset", "none")
    )
    assert (twice.passes, once.passes) == (2, 1)
    assert twice.activations_bytes == pytest.approx(once.activations_bytes, rel=0.1)


def test_results_are_computed_again_for_each_block_of_an_interval(monkeypatch):
    monkeypatch.setattr(MeteredBatch, "calibrate", lambda _: 2.0)
    monkeypatch.setattr(lsim.EffectiveRank, "compute_seconds", lambda *_: 3.0)
    for rows, blocks in ((128, 16), (127, 32)):
        cost = lsim.estimate(tiny_llama(), [lsim.EffectiveRank()], tokens=16 * rows, batch_size=2, seq_len=16, intervals=True)
        # Blocks of 8 rows, and of 4 with a last one of 3.
        assert cost.blocks == blocks
        assert cost.seconds == rows / 2 * 2 + (blocks + 1) * 3


def test_the_time_of_a_batch_is_the_median_of_later_passes(monkeypatch):
    """The first pass is a warm-up. Of a pool of 16 rows, a batch of two costs an eighth."""
    passes, pools = (9.0, 1.0, 5.0, 3.0), (8.0, 8.0, 16.0, 8.0)
    ticks, now = [0.0], 0.0
    for one, pool in zip(passes, pools, strict=True):
        # When the pass begins and ends, when the pool does, and whether there is time for another pass.
        ticks += [now, now + one, now + one, now := now + one + pool, now]
    clock = iter(ticks)
    monkeypatch.setattr("tl_layersim.costs.estimate.CALIBRATION", now)
    monkeypatch.setattr("tl_layersim.costs.estimate.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    cost = lsim.estimate(tiny_llama(), [lsim.CKA(minibatch=256)], tokens=32, **SIZE)
    assert cost.seconds == sorted([1 + 8 / 8, 5 + 16 / 8, 3 + 8 / 8])[1]
    assert not list(clock)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_flops_of_the_forward_pass_are_those_that_torch_counts(make):
    # Without fused attention, which torch counts for GPUs only.
    model = make()
    model.set_attn_implementation("eager")
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    head = 2 * tokens.numel() * model.lm_head.weight.numel()
    cost = lsim.estimate(model, [lsim.CKA(minibatch=16)], tokens=32, **SIZE)
    assert cost.flops["forward"] == counter.get_total_flops() - head


def test_flops_of_fused_attention_are_those_of_its_products():
    q = torch.randn(2, 4, 16, 8)
    with OperationMeter([]) as meter, meter.counting("attention"):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert meter.flops == {"attention": 2 * 2 * 2 * 4 * 16 * 16 * 8}


def test_peak_memory_is_that_of_the_tensors_that_are_alive():
    with OperationMeter([]) as meter:
        for _ in range(3):
            x = torch.ones(1000)
            x = x * 2 + 1
    assert meter.peak == 3 * 4000
    del x
    assert meter.live == 0


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_other_sites_are_read():
    config = config_of(tiny_llama())
    whole = lsim.estimate(config, [lsim.CKA(minibatch=16)], tokens=32, **SIZE)
    heads = lsim.estimate(config, [lsim.CKA(minibatch=16)], tokens=32, at="z", per_head=True, **SIZE)
    assert heads.sites == tiny_llama().config.num_hidden_layers * tiny_llama().config.num_attention_heads
    assert heads.sums_bytes["cka"] != whole.sums_bytes["cka"]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_traffic_is_that_of_the_sums():
    there = lsim.open_model(config_of(tiny_llama()), remote=True)
    cost = lsim.estimate(there, [lsim.Cosine(center="none")], tokens=3200, **SIZE)
    # 256 batches of 32 positions would fit into 8,192: a request holds 64 at most. One more asks what the server offers.
    assert cost.traffic.requests == 3
    # Without values, all sums of two requests, as they are held for a run of one leaf.
    one = lsim.estimate(there, [lsim.Cosine(center="none")], tokens=1, **SIZE)
    assert 0 <= cost.traffic.bytes_down - 2 * sum(one.sums_bytes.values()) < 1000
    assert "3 requests" in repr(cost)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("analyzers", [[lsim.CKA(minibatch=16)], [lsim.LogitLens(labels="data")]], ids=["cka", "labels"])
def test_images_are_of_the_configured_size(analyzers):
    model = image_vit().float()
    config = config_of(model) | {"architectures": ["ViTForImageClassification"]}
    real, meta = (lsim.estimate(given, analyzers, tokens=32, batch_size=2) for given in (model, config))
    assert meta.flops == real.flops
    assert (meta.sums_bytes, meta.activations_bytes) == (real.sums_bytes, real.activations_bytes)
    # 2 x 2 patches and the class token, in 2 rows; the batch is 3.2 times in 32 tokens.
    assert real.batch == (2, 5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.set_attn_implementation("eager")
        model(torch.zeros(2, 3, 8, 8))
    assert real.flops["forward"] == pytest.approx(3.2 * (counter.get_total_flops() - 2 * 2 * 32 * 3))


@pytest.fixture(scope="module")
def deep():
    return lsim.open_model(tiny_llama(layers=32), remote=True)


# Bytes that a real server received and returned for 64 rows of 45 tokens on average at 32 layers, with all of their checks.
@pytest.mark.heavy("a server with a socket")
@pytest.mark.parametrize(
    ("analyzers", "options", "requests", "up", "down"),
    [
        ([lsim.Cosine(center="none"), lsim.CKA(minibatch=64), lsim.Trajectory()], {}, 2, 71_426, 62_217),
        # The first pass also returns means at the first positions, which the warning of Cosine reads: computed, not received.
        ([lsim.Cosine()], {}, 3, 115_882, 69_953),
        ([lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve()], {}, 3, 81_333, 5_571),
        ([lsim.Cosine(center="none"), lsim.CKA(minibatch=64)], {"at": "attn_out"}, 3, 110_058, 65_841),
        ([lsim.Cosine(center="none"), lsim.CKA(minibatch=64)], {"at": "z", "per_head": True}, 2, 71_270, 627_056),
    ],
    ids=["residual stream", "two passes", "lens", "sublayers", "heads"],
)
def test_traffic_is_that_of_a_real_server(deep, analyzers, options, requests, up, down):
    traffic = lsim.estimate(deep, analyzers, tokens=64 * 45, batch_size=64, seq_len=45, **options).traffic
    assert (traffic.requests, traffic.bytes_up) == (requests, pytest.approx(up, rel=0.1))
    assert traffic.bytes_down == pytest.approx(down, rel=0.1)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_part_of_a_batch_costs_a_part_of_its_flops():
    one, all_of_them = (lsim.estimate(config_of(tiny_llama()), lsim.CKA(minibatch=16), tokens=n, **SIZE) for n in (1, 3200))
    assert 3200 * one.flops["forward"] == pytest.approx(all_of_them.flops["forward"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "`tokens`.* 0"),
        ({"seq_len": 0}, "`seq_len`.* 0"),
        ({"batch_size": -1}, "`batch_size`.* -1"),
        ({"seq_len": 10**9}, f"`seq_len`.*{10**9}"),
        ({"analyzers": [lsim.LinearProbe(max_classes=2)]}, "`labels`.*max_classes="),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(lsim.LayersimError, match=message):
        lsim.estimate(tiny_llama(), **({"analyzers": [lsim.CKA()]} | SIZE | arguments))


def test_a_misspelt_field_is_named():
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layer": 2, "num_attention_heads": 2, "rope_theta": 1e4}
    small = {"intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64, "_name": "x", "sep_token_id": 1}
    with pytest.warns(lsim.LayersimWarning, match=r"LlamaConfig .*\bnum_hidden_layer;"):
        lsim.estimate(config | small, [lsim.CKA()], **SIZE)


def test_a_mapping_without_a_type_is_refused():
    with pytest.raises(lsim.LayersimError, match=r"^`model_or_config` is "):
        lsim.estimate({"hidden_size": 64}, [lsim.CKA()])
