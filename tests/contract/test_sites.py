"""Sites: every analyzer, at every family of hook points, of every source, and the places that their names stand for.

Analyzers are discovered, and families come from the model's own table: a new one of either is under these laws without an edit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import Analyzer, find_analyzers
from tl_layersim.architectures.hook_points import HEAD_FAMILIES, SITE_NAMES
from tl_layersim.core import LayerCurve

from ..models.site_hooks import D_HEAD, MODELS, head_part, read_sites
from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import bridge, hooked_transformer, nnsight, transformers_model
from ..running.options import called

SOURCES = {
    "NNsight": lambda make, tmp: (nnsight(make()), {}),
    "NNsight remote=local": lambda make, tmp: (nnsight(make()), {"remote": "local"}),
    "TransformersModel": lambda make, tmp: (transformers_model(make(), tmp), {}),
    "TransformerBridge": lambda make, tmp: (bridge(make()), {}),
    "NNsight(TransformerBridge)": lambda make, tmp: (nnsight(bridge(make())), {}),
    "HookedTransformer": lambda make, tmp: (hooked_transformer(make()), {}),
}
# Those of one model.
ANALYZERS = {name: cls for name, cls in find_analyzers().items() if cls().needs.models != "two"}
HEADS = 4
KEY_HEADS = {"llama": 2}
each_model = pytest.mark.parametrize("name", MODELS)
each_source = pytest.mark.parametrize("source", SOURCES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated"),
    pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning"),
]


@dataclass(frozen=True)
class Projection(Analyzer):
    """One number for each site, which changes if a token, a dimension or a head is another one: a fixed linear function.

    The sums differ from each other for all tensors of a model, where statistics that are invariant to rotations do not.
    """

    name: ClassVar[str] = "projection"

    def kernel(self, first):
        return projection_kernel

    def compute(self, sums, run):
        return LayerCurve(values=sums["sum"], layers=run.layers, provenance=run.provenance)


def projection_kernel(view):
    tokens = torch.cos(1.0 + view.column.double() + 7.0 * view.row.double())
    dimensions = torch.cos(1.7 * torch.arange(view.activations.shape[-1], dtype=torch.float64))
    return {"sum": torch.einsum("snd,n,d->s", view.activations.double(), tokens.to(view.activations.device), dimensions)}


def project(hidden: torch.Tensor, mask: torch.Tensor) -> float:
    """The same from a whole tensor `batch pos width`, with loops."""
    dimensions = np.cos(1.7 * np.arange(hidden.shape[-1]))
    total = 0.0
    for row, position in mask.nonzero().tolist():
        total += np.cos(1.0 + position + 7.0 * row) * float(hidden[row, position].double().numpy() @ dimensions)
    return total


@pytest.fixture(scope="module")
def data():
    mask = torch.ones(4, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    mask[3, :4] = 0
    return {"input_ids": random_tokens(4, 10), "attention_mask": mask}


@pytest.fixture(scope="module")
def tables():
    """The tables of sites of the Hugging Face models."""
    return {name: lsim.sites(make()) for name, make in MODELS.items()}


def everything(table) -> list[str]:
    return list(dict.fromkeys(table.family))


def heads_of(table) -> list[str]:
    return [f"{row.name}[{head}]" for row in table.itertuples(index=False) for head in range(row.heads)]


@pytest.mark.light("llama", "bert")
@each_model
def test_axis_names_are_verified_by_hooks_of_the_test(name, data, tables):
    model = MODELS[name]()
    table = tables[name]
    mask = data["attention_mask"]
    tensors = read_sites(model, table, data)
    result = lsim.analyze(model, data, Projection(), at=everything(table))["projection"]
    assert result.layers == tuple(table.name)
    expected = {site: project(tensor, mask) for site, tensor in tensors.items()}
    np.testing.assert_allclose(result.values, [expected[site] for site in result.layers], rtol=1e-5, atol=1e-5)
    # No two names can be exchanged: only the input of a block has the number of another site, the output of the block before.
    assert len({round(value, 9) for value in expected.values()}) == len(expected) - 2

    divided = table[table.heads > 0]
    by_head = lsim.analyze(model, data, Projection(), at=list(HEAD_FAMILIES), per_head=True)["projection"]
    assert set(divided.family) == set(HEAD_FAMILIES)
    assert by_head.layers == tuple(heads_of(divided))
    for site, value in zip(by_head.layers, by_head.values, strict=True):
        stem = site.split("[")[0]
        count = KEY_HEADS.get(name, HEADS) if stem[-1] in "kv" else HEADS
        assert tensors[stem].shape[-1] == count * D_HEAD
        assert float(value) == pytest.approx(project(head_part(tensors[stem], site), mask), rel=1e-5, abs=1e-4), site


@pytest.mark.light("NNsight-llama", "TransformersModel-neox", "NNsight(TransformerBridge)-llama")
@each_model
@each_source
def test_every_source_reads_the_same_tensors_under_the_same_names(name, source, data, tables, tmp_path):
    model, options = opened(name, source, tmp_path)
    table = lsim.sites(model)
    assert list(table.name) == list(tables[name].name)
    assert list(table.heads) == list(tables[name].heads)
    for asked in ({"at": everything(table)}, {"at": list(HEAD_FAMILIES), "per_head": True}):
        expected = called(lsim.analyze, MODELS[name](), data, Projection(), **asked)["projection"]
        result = called(lsim.analyze, model, data, Projection(), **asked, **options)["projection"]
        assert result.layers == expected.layers
        np.testing.assert_allclose(result.values, expected.values, rtol=2e-5, atol=2e-5)
        assert result.provenance.data == expected.provenance.data


def opened(name, source, tmp_path):
    """The model in a source, or a skip."""
    if source == "HookedTransformer" and name != "gpt2":
        pytest.skip("the weights of one model are converted for HookedTransformer in these tests: GPT-2's")
    return SOURCES[source](MODELS[name], tmp_path)


def takes(cls, families: list[str], family: str) -> bool:
    """Whether an analyzer reads a family by what its class declares."""
    needs = cls().needs
    if needs.families:
        return True
    if needs.sites in ("stream", "every_block"):
        return family == "resid_post" or (family == "resid_mid" and needs.resid_mid and family in families)
    return family in families


def reads_any_site(cls) -> bool:
    """Whether an analyzer reads the sites of `at`, whichever they are."""
    return cls().needs.sites in ("any", "equal_width") and not cls().needs.families


def refuses_model(model, data, keys, **options) -> bool:
    """Whether one of the analyzers refuses the model itself, as some refuse post-norm blocks."""
    try:
        called(lsim.analyze, model, data, [ANALYZERS[key]() for key in keys], **options)
    except lsim.LayersimError:
        return True
    return False


def taken(model, data, keys, **options) -> list[str]:
    """The analyzers that do not refuse the model: one run of all of them says so of all, unless one refuses it."""
    if not refuses_model(model, data, keys, **options):
        return list(keys)
    return [key for key in keys if not refuses_model(model, data, [key], **options)]


@pytest.fixture(scope="module")
def usable(data):
    """Gives the analyzers that do not refuse a Hugging Face model."""

    @functools.cache
    def of_model(name: str) -> list[str]:
        return taken(MODELS[name](), data, ANALYZERS)

    return of_model


@pytest.fixture(scope="module")
def answers(data, tables, usable):
    """Gives the results of a Hugging Face model, by family, of all analyzers that take the family together."""

    @functools.cache
    def of_model(name: str) -> dict[str, lsim.Report]:
        model = MODELS[name]()
        families = everything(tables[name])
        reports = {}
        for family in families:
            taking = [ANALYZERS[key]() for key in usable(name) if takes(ANALYZERS[key], families, family)]
            reports[family] = lsim.analyze(model, data, taking, at=family)
        return reports

    return of_model


@pytest.mark.heavy("every analyzer at every family of sites")
@each_model
@pytest.mark.parametrize("key", ANALYZERS)
def test_an_analyzer_takes_a_family_or_refuses_it_by_name(name, key, data, tables, answers, usable):
    model = MODELS[name]()
    table = tables[name]
    cls = ANALYZERS[key]
    families = everything(table)
    refused = key not in usable(name)
    for family in SITE_NAMES:
        if takes(cls, families, family) and not refused:
            result = answers(name).get(family, lsim.Report({})).get(key) or lsim.analyze(model, data, cls(), at=family)[key]
            assert repr(result)
            names_of_family = tuple(table.name[table.family == family])
            if reads_any_site(cls):
                first = tuple(table.name)[:1] if family == "resid_post" else ()
                assert result.layers == first + names_of_family
                assert result.provenance.options["at"] == family
            continue
        with pytest.raises(lsim.LayersimError) as error:
            lsim.analyze(model, data, cls(), at=family)
        assert "`at`" in str(error.value) or refused, str(error.value)
        if family not in families and reads_any_site(cls):
            assert families[0] in str(error.value), "the refusal lists what the model has"


@pytest.mark.light("NNsight-llama")
@each_model
@each_source
def test_every_analyzer_gives_one_answer_at_every_source(name, source, data, answers, tmp_path):
    model, options = opened(name, source, tmp_path)
    asked_of_all = taken(model, data, answers(name)["resid_post"], **options)
    # What differs between families is compared above, for each source.
    for family in ("resid_post", "z", "mlp_post"):
        expected = answers(name)[family]
        # Analyzers with families of their own read the same at all.
        asked = [
            ANALYZERS[key]()
            for key in asked_of_all
            if key in expected and (family == "z" or not ANALYZERS[key]().needs.families)
        ]
        report = called(lsim.analyze, model, data, asked, at=family, **options)
        for key, result in report.items():
            assert result.layers == expected[key].layers
            np.testing.assert_allclose(result.values, expected[key].values, rtol=1e-4, atol=1e-4, err_msg=f"{key} at {family}")


@pytest.mark.light("NNsight", "NNsight remote=local", "TransformerBridge", "NNsight(TransformerBridge)")
@each_source
def test_every_source_refuses_what_the_model_lacks(source, data, tmp_path):
    name = "gpt2" if source == "HookedTransformer" else "neox"
    lacking = "cross_attn_out" if source == "HookedTransformer" else "resid_mid"
    model, options = opened(name, source, tmp_path)
    for cls in ANALYZERS.values():
        if cls().needs.families:
            continue
        with pytest.raises(lsim.LayersimError, match="`at`"):
            called(lsim.analyze, model, data, cls(), at=lacking, **options)

    with pytest.raises(lsim.LayersimError, match=r"`per_head`.*True.*attn_out.*q, k, v, z"):
        called(lsim.analyze, model, data, "cka", at="attn_out", per_head=True, **options)


@pytest.mark.parametrize("cls", find_analyzers().values())
def test_a_class_declares_nothing_that_analyzers_do_not_have(cls):
    declared = {name for name, kind in cls.__annotations__.items() if str(kind).startswith("ClassVar")}
    bases = {name for base in cls.__mro__[1:] for name in vars(base).get("__annotations__", {})}
    assert declared <= bases, "a misspelt class attribute changes nothing"


SOURCES_HERE = {"Hugging Face": lambda make: (make(), {})} | {
    key: lambda make, key=key: SOURCES[key](make, None) for key in ("NNsight", "NNsight remote=local", "TransformerBridge")
}


@pytest.mark.light("attn_out-Hugging Face", "mlp_out-NNsight remote=local")
@pytest.mark.parametrize("source", SOURCES_HERE)
@pytest.mark.parametrize("wrong", ["attn_out", "resid_mid", "mlp_out"])
def test_a_mislabelled_hook_point_is_caught_on_the_first_row(source, wrong, data, monkeypatch):
    from tl_layersim.sources import source as source_module

    plain = source_module.site_map

    def mislabelled(*args):
        """Block 1's site is read at block 0."""
        site_map = plain(*args)
        places = {site.block: site.point for site in site_map.sites if site.family == wrong}

        def moved(point):
            return replace(places[0], name=point.name) if point.name == places[1].name else point

        sites = tuple(replace(site, point=moved(site.point)) for site in site_map.sites)
        sums = tuple(
            replace(site_sum, total=moved(site_sum.total), terms=tuple(map(moved, site_sum.terms)))
            for site_sum in site_map.sums
        )
        return replace(site_map, sites=sites, sums=sums)

    model, options = SOURCES_HERE[source](tiny_llama)
    called(lsim.analyze, model, data, Projection(), at=wrong, **options)
    monkeypatch.setattr(source_module, "site_map", mislabelled)
    with pytest.raises(lsim.LayersimError, match=r"do not add up to its residual stream(.|\n)*blocks\.1\."):
        called(lsim.analyze, model, data, Projection(), at=wrong, **options)
