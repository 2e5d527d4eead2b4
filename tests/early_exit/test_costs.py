"""Costs of exits, and which layers to exit at."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.early_exit.early_exit import EarlyExit
from tl_layersim.early_exit.exit_costs import ExitCosts, evenly_spread, exited_fractions, plan_for

from ..models.tiny_models import VOCABULARY, tiny_gpt2, tiny_llama


class TestCosts:
    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("batch", [1, 4])
    def test_programme_is_the_best_of_all_subsets(self, seed, batch):
        random = torch.Generator().manual_seed(seed)
        draw = lambda high=1.0: float(torch.rand((), generator=random)) * high  # noqa: E731
        costs = ExitCosts(
            block=draw(), check=draw(0.6), head=draw(2), blocks=7, start=draw(), batch=batch, full_check=seed % 2 == 0
        )
        gone = [*sorted(draw() for _ in range(6)), 0.0]

        def naive(at):
            """The expected step, from what each check and stretch costs."""
            cost = costs.start
            before = -1
            share = 0.0
            for layer in (*at, 6):
                cost += (layer - before) * costs.block * (1 - share**batch)
                if layer == 6:
                    return cost + costs.head * (1 - share**batch)
                then = gone[layer]
                cost += costs.check * (1 - share**batch)
                if not costs.full_check:
                    cost += costs.head * (1 - (1 - (then - share)) ** batch)
                before = layer
                share = then
            return cost

        full = costs.start + 7 * costs.block + costs.head
        assert costs.full() == pytest.approx(full)
        best = min((s for n in range(7) for s in itertools.combinations(range(6), n)), key=naive)
        plan = plan_for(costs, gone)
        assert plan.at == best
        assert plan.speedup == pytest.approx(full / naive(best))
        assert sum(plan.exits.values()) == pytest.approx(1)
        plan_of_two_exits = plan_for(costs, gone, (1, 4))
        assert plan_of_two_exits.speedup == pytest.approx(full / naive((1, 4)))
        assert plan_of_two_exits.exits == pytest.approx({1: gone[1], 4: gone[4] - gone[1], 6: 1 - gone[4]})

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_measured_costs_are_times(self):
        costs = ExitCosts.measure(tiny_llama(4), batch=2, repeats=3, context=8)
        assert costs.blocks == 4
        assert costs.batch == 2
        assert 0 < costs.full() < 1
        assert min(costs.block, costs.check, costs.head, costs.start) >= 0
        # GPT-2 has no more than 64 positions.
        assert ExitCosts.measure(tiny_gpt2(), repeats=61).blocks == 3
        with pytest.raises(lsim.LayersimError, match="`repeats` is 62; it must be at most 61"):
            ExitCosts.measure(tiny_gpt2(), repeats=62)

    def test_layers_are_chosen_from_a_curve(self, demo):
        curve = lsim.analyze(demo, lsim.demo_text()[:6], [lsim.ExitCurve(thresholds=(0.5, 0.9))])["exit_curve"]
        shares = exited_fractions(curve, 0.5, 8)
        exits = curve.at(0.5).exits
        assert shares[:7] == pytest.approx([float(exits[: i + 1].sum() / exits.sum()) for i in range(7)])

        costs = ExitCosts(block=1, check=0.5, head=0.5, blocks=8)
        early = EarlyExit(demo, 0.5, curve=curve, costs=costs)
        assert early.at == early.plan.at == plan_for(costs, shares).at
        assert "is expected" in str(early.plan)

        with pytest.warns(lsim.LayersimWarning, match="slower"):
            EarlyExit(demo, 0.9, curve=curve, costs=replace(costs, check=5.0), at="all")
        with pytest.raises(lsim.LayersimError, match="`costs` is None"):
            EarlyExit(demo, 0.5, curve=curve)
        for model, options, words in (
            (demo, {"threshold": 0.7}, r"`threshold`.*0\.7"),
            (demo, {"threshold": 0.5, "rule": "margin"}, r"`rule`.*margin.*`curve`"),
            (tiny_llama(), {"threshold": 0.5}, r"`curve`.* 8 blocks.* 3"),
        ):
            with pytest.raises(lsim.LayersimError, match=words):
                EarlyExit(model, curve=curve, costs=costs, **options)

    @pytest.mark.heavy("seconds, where faster tests reach the same")
    def test_few_layers_without_a_curve(self):
        assert evenly_spread(12, 0.1 / 12.1) == evenly_spread(12, 0.0) == (1, 4, 6, 9)
        assert evenly_spread(12, 0.08) == (3, 7)
        assert evenly_spread(12, 0.05) == (2, 5, 8)
        assert evenly_spread(12, 5 / 17) == (5,)
        assert evenly_spread(1, 5 / 6) == ()

        # Checks over three words, and of cosines, read next to nothing.
        model = tiny_llama(12)
        block = sum(p.numel() for p in model.model.layers[0].parameters())
        # The norm and the unembedding.
        head = (1 + VOCABULARY) * 32
        assert EarlyExit(model).at == evenly_spread(12, head / (12 * block + head))
        assert EarlyExit(model, shortlist=[1, 2, 3]).at == EarlyExit(model, rule="cosine").at == (1, 4, 6, 9)

        # Given costs count in place of weights.
        costs = ExitCosts(block=1, check=0.1, head=0.1, blocks=12)
        assert EarlyExit(model, costs=costs).at == (1, 4, 6, 9)
        assert EarlyExit(model, costs=replace(costs, check=5.0, head=5.0)).at == (5,)
        assert EarlyExit(model, costs=replace(costs, check=0.75, head=3.0)).at == (2, 5, 8)

        # The head counts beside the blocks: as many words as cost a twelfth of both, and more than a twelfth of the blocks.
        words = (3 * block + head) // (12 * 32)
        assert words * 12 * 32 > 3 * block
        assert EarlyExit(tiny_llama(3), shortlist=list(range(words))).at == (0, 1)
