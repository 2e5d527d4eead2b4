"""The laws of exit rules, over every rule that is discovered: a new file in `early_exit/rules/` needs no edit here."""

from __future__ import annotations

import inspect
import itertools
import sys

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.early_exit import rules
from tl_layersim.early_exit.rules import EXIT_RULES, CheckedTokens

from ..models.tiny_models import random_tokens, tiny_llama

RULES = sorted(EXIT_RULES.all().items())
each_rule = pytest.mark.parametrize(("name", "cls"), RULES, ids=[name for name, _ in RULES])
LAYERS = 6
# A rule takes those that its range allows.
CANDIDATES = (-1.0, 0.0, 0.3, 0.6, 0.8, 0.9, 0.97, 0.999, 1.0, 2.0, 3.0, 4.0)


@pytest.fixture(scope="module")
def model():
    """Six random blocks and a head sharp enough that tokens exit at several depths."""
    model = tiny_llama(LAYERS)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
    return model


def allowed(cls, candidates=CANDIDATES) -> list[float]:
    """The candidates that are thresholds of a rule, ascending, and its unreachable one."""
    taken = {float(cls.unreachable)}
    for threshold in candidates:
        try:
            cls(threshold)
        except lsim.LayersimError:
            continue
        taken.add(threshold)
    return sorted(taken)


def middle(model, name, cls) -> float:
    """A threshold at which tokens exit at more than one depth."""
    for threshold in allowed(cls):
        exits = lsim.EarlyExit(model, threshold, at="all", rule=name).logits(random_tokens(4, 12)).exits
        if len(exits.unique()) > 2:
            return threshold
    raise AssertionError(f"no threshold of {name} gives exits at several depths")


def tokens_of(generated) -> list[list[int]]:
    return [row.tolist() for row in (*generated.tokens, *generated.exits)]


@each_rule
def test_it_has_a_name_a_source_and_an_example(name, cls):
    assert cls.name == name
    text = inspect.getdoc(cls)
    for part in ("threshold", "Source:", "Examples:"):
        assert part in text, f"{cls.__name__} lacks {part}"


@pytest.mark.heavy("seconds, where faster tests reach the same")
@each_rule
def test_a_higher_threshold_exits_no_earlier(model, name, cls):
    tokens = random_tokens(4, 12)
    depths = [lsim.EarlyExit(model, t, at="all", rule=name).logits(tokens).exits for t in allowed(cls)]
    for lower, higher in itertools.pairwise(depths):
        assert (lower <= higher).all()
    assert (depths[0] < depths[-1]).any(), "the lowest threshold lets some token exit early"


@each_rule
def test_an_unreachable_threshold_runs_the_full_model(model, name, cls):
    early = lsim.EarlyExit(model, cls.unreachable, at="all", rule=name)
    tokens = random_tokens(3, 8)
    found = early.logits(tokens)
    with torch.no_grad():
        own = model(tokens).logits
    torch.testing.assert_close(found.logits, own, rtol=1e-5, atol=1e-5)
    assert set(found.exits.flatten().tolist()) == {LAYERS}
    assert found.share_of_block_tokens == 1
    written = early.generate(tokens, max_new_tokens=8, eos_token_id=())
    expected = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 8:]
    assert torch.stack(written.tokens).tolist() == expected.tolist()
    assert (found.checks, written.checks) == (0, 0)
    highest = [t for t in allowed(cls) if t < cls.unreachable][-1]
    assert cls(cls.unreachable).never
    assert not cls(highest).never


@pytest.mark.heavy("seconds, where faster tests reach the same")
@each_rule
def test_a_generation_leaves_no_state_to_the_next(model, name, cls):
    threshold = middle(model, name, cls)
    first, second = random_tokens(2, 6, seed=1), random_tokens(3, 9, seed=2)
    early, fresh = (lsim.EarlyExit(model, threshold, at="all", rule=name) for _ in range(2))
    options = {"max_new_tokens": 12, "eos_token_id": ()}
    before = early.generate(first, **options)
    early.logits(first)
    assert tokens_of(early.generate(second, **options)) == tokens_of(fresh.generate(second, **options))
    assert torch.equal(early.logits(second).exits, fresh.logits(second).exits)
    assert tokens_of(early.generate(first, **options)) == tokens_of(before)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@each_rule
def test_the_order_of_rows_does_not_matter(model, name, cls):
    early = lsim.EarlyExit(model, middle(model, name, cls), at="all", rule=name)
    tokens, order = random_tokens(4, 7), [2, 0, 3, 1]
    options = {"max_new_tokens": 12, "eos_token_id": ()}
    plain, shuffled = early.generate(tokens, **options), early.generate(tokens[order], **options)
    for row, place in enumerate(order):
        assert shuffled.tokens[row].tolist() == plain.tokens[place].tolist()
        assert shuffled.exits[row].tolist() == plain.exits[place].tolist()
    assert len(torch.cat(plain.exits).unique()) > 1
    assert torch.equal(early.logits(tokens[order]).exits, early.logits(tokens).exits[order])


@each_rule
def test_a_decision_depends_on_its_own_token_alone(name, cls):
    checks = [synthetic_check(torch.float32, seed=seed) for seed in range(3)]
    count = len(checks[0].index)
    for threshold in allowed(cls):
        rule = cls(threshold)
        state = rule.new_state(count)
        together = [rule.exits(check, state) for check in checks]
        for token in range(0, count, 7):
            state, one = rule.new_state(1), torch.zeros(1, dtype=torch.int64)
            own = slice(token, token + 1)
            for check, decided in zip(checks, together, strict=True):
                alone = CheckedTokens(check.logits[own], check.entering[own], check.leaving[own], one)
                assert bool(rule.exits(alone, state)) == bool(decided[token])


@each_rule
@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), float("-inf"), "below"])
def test_a_bad_threshold_is_refused(model, name, cls, threshold):
    threshold = cls.lowest - 1.0 if threshold == "below" else threshold
    with pytest.raises(lsim.LayersimError, match="`threshold`"):
        lsim.EarlyExit(model, threshold, rule=name)


@each_rule
def test_decisions_near_1_are_those_of_float64(name, cls):
    """Decisions on float32 activations are those on the same numbers in float64, also where float32 has no number below 1."""
    narrow = synthetic_check(torch.float32)
    wide = CheckedTokens(narrow.logits.double(), narrow.entering.double(), narrow.leaving.double(), narrow.index)
    near = [1 - 10.0**-digits for digits in range(2, 11)]
    for threshold in allowed(cls, (*CANDIDATES, *near)):
        rule = cls(threshold)
        decisions = [rule.exits(check, rule.new_state(len(check.index))) for check in (narrow, wide)]
        assert torch.equal(*decisions), threshold
    if cls.unreachable == 1:
        counts = [int(cls(1 - gap).exits(narrow, cls(1 - gap).new_state(len(narrow.index))).sum()) for gap in (1e-8, 1e-10)]
        assert counts[0] > counts[1], "float32 rounds both thresholds to 1"


def synthetic_check(dtype: torch.dtype, seed: int = 0) -> CheckedTokens:
    """Tokens whose probabilities and cosines come as close to 1 as 1e-11."""
    random = torch.Generator().manual_seed(seed)
    count = 200
    logits = torch.randn(count, 12, generator=random)
    logits[torch.arange(count), torch.randint(12, (count,), generator=random)] += torch.linspace(0, 28, count)
    entering = torch.randn(count, 16, generator=random)
    change = torch.randn(count, 16, generator=random) * torch.logspace(0, -6, count)[:, None]
    return CheckedTokens(logits.to(dtype), entering.to(dtype), (entering + change).to(dtype), torch.arange(count))


def test_an_unknown_rule_is_refused_with_the_names_of_all(model):
    for call in (lsim.EarlyExit, lsim.early_exit.ExitCosts.measure):
        with pytest.raises(lsim.LayersimError, match=r"`rule`.*no-such-rule") as caught:
            call(model, rule="no-such-rule")
        for name, _ in RULES:
            assert name in str(caught.value)


NEW_RULE = '''
from torch import Tensor

from tl_layersim.early_exit.rules import CheckedTokens, ExitRule, RuleState


class EntropyRule(ExitRule):
    """A token exits when 1 - entropy / ln vocabulary exceeds the threshold."""

    name = "entropy"

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        p = tokens.logits.double().softmax(-1)
        return 1 + (p * p.clamp(min=1e-300).log()).sum(-1) / p.new_tensor(p.shape[-1]).log() > self.threshold
'''


def test_a_rule_in_a_new_file_is_found_by_its_name(model, tmp_path, monkeypatch):
    (tmp_path / "entropy.py").write_text(NEW_RULE)
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    try:
        assert "entropy" in EXIT_RULES.all()
        tokens = random_tokens(2, 8)
        early = lsim.EarlyExit(model, 0.5, at="all", rule="entropy")
        exits = early.logits(tokens).exits
        with torch.no_grad():
            states = model(tokens, output_hidden_states=True).hidden_states
            # transformers applies the final norm to the last one.
            p = torch.stack([model.lm_head(model.model.norm(x)) for x in states[1:-1]]).double().softmax(-1)
        sure = 1 + (p * p.log()).sum(-1) / torch.tensor(100.0).double().log() > 0.5
        expected = torch.cat([sure, torch.ones_like(sure[:1])]).int().argmax(0) + 1
        assert torch.equal(exits, expected)
        assert len(exits.unique()) > 1
        assert lsim.early_exit.ExitCosts.measure(model, rule="entropy", repeats=3).full_check
        assert len(early.generate(tokens, max_new_tokens=3, eos_token_id=()).tokens[0]) == 3
    finally:
        sys.modules.pop("tl_layersim.early_exit.rules.entropy", None)
        vars(rules).pop("entropy", None)
