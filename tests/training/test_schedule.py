"""Which layers learn at which step, and how fast."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

import tl_layersim as lsim
from tl_layersim.training.losses import layer_weights
from tl_layersim.training.residual_stream import TrainingBatch, open_residual_stream

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import next_of


class TestSchedule:
    def test_steps_alternate_from_the_last_layer(self):
        training = lsim.AlignedTraining(steps=6, schedule="alternating")
        assert [len(training.terms(step, 4)) for step in range(6)] == [1, 4, 1, 4, 1, 4]
        assert training.terms(0, 4) == {4: 1.0}
        assert all(len(lsim.AlignedTraining(schedule="always").terms(step, 4)) == 4 for step in range(6))

    @pytest.mark.parametrize("k", [1, 2, 3])
    def test_drawn_layers_are_unbiased(self, k):
        """The mean over all draws that there are is the aligned loss; and each draw is as likely as each other."""
        weights = layer_weights("linear", 4)
        total = dict.fromkeys(range(1, 5), 0.0)
        draws = list(itertools.combinations(range(1, 5), k))
        training = lsim.AlignedTraining(layers_per_step=k, schedule="always")
        counts = dict.fromkeys(draws, 0)

        for step in range(4000):
            terms = training.terms(step, 4)
            counts[tuple(terms)] += 1
            assert all(math.isclose(weight, weights[layer - 1] * 4 / k) for layer, weight in terms.items())

        for draw in draws:
            for layer in draw:
                total[layer] += weights[layer - 1] * 4 / k / len(draws)
        assert list(total.values()) == pytest.approx(weights)

        expected = 4000 / len(draws)
        chi = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi < 25

    def test_drawn_layers_skip_what_is_above_them(self):
        model = tiny_llama(layers=4)
        ran = []
        for number, block in enumerate(model.model.layers):
            block.register_forward_hook(lambda *_, number=number: ran.append(number))
        stream = open_residual_stream(model)
        tokens = random_tokens(2, 6)
        stream.loss(TrainingBatch(tokens, {}, next_of(tokens), None), {2: 1.0}, True)

        assert ran == [0, 1]

    def test_the_rate_rises_and_falls(self):
        training = lsim.AlignedTraining(steps=10, warmup=4, lr=1.0)
        assert [round(training.rate(step), 6) for step in range(10)] == [
            0.25,
            0.5,
            0.75,
            1.0,
            1.0,
            0.833333,
            0.666667,
            0.5,
            0.333333,
            0.166667,
        ]

    @pytest.mark.parametrize(
        "wrong",
        [{"steps": 0}, {"lr": 0}, {"lr": math.inf}, {"warmup": 1001}, {"accumulation": 0}, {"layers_per_step": 0},
         {"eval_every": 0}, {"clip": 0}, {"weight_decay": -1}, {"beta": 2.0}, {"kl": 1.0},
         {"objective": "standard", "layers_per_step": 2}],
    )  # fmt: skip
    def test_what_makes_no_sense_is_refused(self, wrong):
        with pytest.raises(lsim.LayersimError):
            lsim.AlignedTraining(**wrong)


def test_presets_have_the_values_of_the_papers():
    gpt2 = lsim.AlignedTraining.paper_gpt2()
    bert = lsim.AlignedTraining.paper_bert(rows=2490)
    stitch = lsim.stitching.StitchTraining.paper()
    aligned = ("objective", "schedule", "weights", "norm", "lr", "warmup", "weight_decay", "clip")

    for training, steps in ((gpt2, 40_000), (bert, 234)):
        assert training.steps == steps
        values = [getattr(training, name) for name in aligned]
        assert values == ["aligned", "alternating", "linear", "none", 2e-5, 0, 0.01, math.inf]
    assert (stitch.steps, stitch.lr, stitch.momentum, stitch.warmup, stitch.clip) == (2000, 1.0, 0.9, None, 1.0)
    assert not stitch.relative
    assert [stitch.rate(step) for step in (0, 199)] == pytest.approx([0.1 / 200, 0.1])

    model = tiny_llama()
    tokens = random_tokens(4, 6)
    result = lsim.finetune_aligned(model, lsim.Data(tokens, batch_size=2), replace(bert, steps=1))
    assert (len(result.loss), result.provenance.options["norm"]) == (1, "none")

    few = replace(stitch, steps=1)
    stitched = lsim.stitch(model, tiny_llama(), tokens, at=(0, 0), adapter="affine-norm", fit="sgd", training=few)
    assert len(stitched.curve) == 1
    with pytest.raises(lsim.LayersimError, match=r"`rows`.*0"):
        lsim.AlignedTraining.paper_bert(0)
