"""What analyzers declare: one value, whose fields are checked, and which options may decide."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import Needs, find_analyzers
from tl_layersim.analyzers.analyzer import code_digest
from tl_layersim.engine.site_plan import plan_sites
from tl_layersim.remote.open_model import open_source

from ..engine.run_inputs import OwnNorm
from ..models.tiny_models import tiny_llama

CLASSES = torch.tensor([0, 1, 1, 0])


@pytest.mark.parametrize("name", ["models", "sites", "head", "labels", "first_pass", "largest_sums"])
def test_a_misspelt_word_is_refused(name):
    with pytest.raises(lsim.LayersimError, match=f"`{name}`.*'every_blok'"):
        Needs(**{name: "every_blok"})


def test_a_misspelt_field_is_refused():
    with pytest.raises(TypeError, match="site"):
        Needs(site="stream")


@pytest.mark.parametrize("cls", find_analyzers().values())
def test_an_analyzer_declares_one_frozen_value(cls):
    needs = cls().needs

    assert needs == cls().needs
    with pytest.raises(dataclasses.FrozenInstanceError):
        needs.sites = "any"


@pytest.mark.parametrize(
    ("head", "unembeds", "positions_of_head"),
    [("none", False, False), ("logits", True, True), ("norm", True, False), ("positions", False, True)],
)
def test_what_the_head_implies(head, unembeds, positions_of_head):
    needs = Needs(head=head)

    assert (needs.unembeds, needs.positions_of_head) == (unembeds, positions_of_head)


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        (Needs(), False),
        (Needs(head="positions"), False),
        (Needs(labels="data"), False),
        (Needs(labels="next_token"), True),
        (Needs(head="norm"), True),
        (Needs(calls=True), True),
    ],
)
def test_logits_replays_and_next_tokens_need_single_positions(needs, expected):
    assert needs.single_positions is expected


@pytest.mark.parametrize(
    ("labels", "source", "own_labels"),
    [("none", "none", False), ("next_token", "next_token", False), ("data", "data", True), (CLASSES, "rows", True)],
)
def test_labels_are_declared_by_their_source(labels, source, own_labels):
    needs = lsim.LogitLens(labels=labels).needs

    assert needs.labels == source
    assert needs.own_labels is own_labels


@pytest.mark.parametrize(
    ("analyzer", "field", "value"),
    [
        (lsim.Trajectory(), "head", "none"),
        (lsim.Trajectory(final_norm=True), "head", "norm"),
        (lsim.Trajectory(per_prompt=True), "single_texts", True),
        (lsim.NeuralCollapse(labels=CLASSES, pool="head"), "head", "positions"),
        (lsim.NeuralCollapse(pool="head"), "head", "none"),
        (lsim.CKA(estimator="exact"), "whole_texts", True),
        (lsim.CKA(estimator="exact", unit="token"), "whole_texts", False),
        (lsim.CKA(level="sequence"), "whole_rows", True),
        (lsim.InterventionEffect(lens=False), "sites", "any"),
        (lsim.InterventionEffect(), "sites", "every_block"),
        (lsim.LinearPredictivity(), "symmetric", False),
        (lsim.Cosine(center="none"), "dominance", ("power",)),
        (lsim.Cosine(), "dominance", ("variance",)),
    ],
)
def test_options_decide(analyzer, field, value):
    assert getattr(analyzer.needs, field) == value


@dataclasses.dataclass(frozen=True)
class StreamNorm(OwnNorm):
    needs = Needs(sites="every_block")


def test_what_a_users_class_declares_is_in_its_digest(monkeypatch):
    before = code_digest(StreamNorm())

    monkeypatch.setattr(StreamNorm, "needs", Needs(sites="every_block", single_texts=True))

    assert code_digest(StreamNorm()) != before


def test_planning_sites_changes_no_model():
    source = open_source(tiny_llama())
    before = source.sites

    plan = plan_sites([source], {"cka": lsim.CKA()}, at="mlp_out")

    assert source.sites == before

    plan.start_reading()
    assert source.sites == tuple(f"blocks.{block}.hook_mlp_out" for block in range(len(before) - 1))
    assert plan.models()["cka"][0].layers == source.sites
