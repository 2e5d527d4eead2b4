"""Figures of results: layers by name, quantities in words with units."""

from __future__ import annotations

import importlib

import pytest

import tl_layersim as lsim
from tl_layersim.reporting.labels import AXES, QUANTITIES

from ..core.helpers import curve
from ..tiny_models import random_tokens, tiny_llama


def result_classes() -> list[type[lsim.Result]]:
    """Every class of results of this package."""
    for name in lsim.__all__:
        getattr(lsim, name)
    importlib.import_module("tl_layersim.training.layer_evaluation_results")
    found, waiting = [], [lsim.Result]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__.startswith("tl_layersim"):
            found.append(cls)
    return found


def fields_of(cls: type[lsim.Result]) -> dict[str, tuple[str, ...]]:
    return {cls.values_name if name == "values" else name: axes for name, axes in cls.tensor_fields().items()}


@pytest.fixture(scope="module")
def report():
    analyzers = [lsim.Cosine(), lsim.CKA(minibatch=16), lsim.LogitLens(), lsim.ExitCurve()]
    return lsim.analyze(tiny_llama(), random_tokens(), analyzers)


def test_plots_carry_layer_names(report):
    fig = report["cosine"].plot()
    assert list(fig.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    assert list(fig.data[0].customdata[0][0]) == ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"]
    assert len(report["cosine"].plot("to_last").data) == 5
    assert list(report["cosine"].plot("norm_ratio").layout.xaxis.ticktext) == ["0", "1", "2"]
    assert curve().plot().data[0].y.tolist() == [0, 1, 2]


def test_axes_and_colour_bars_are_words_with_units(report):
    lens = report["logit_lens"].plot().layout
    assert (lens.xaxis.title.text, lens.yaxis.title.text) == ("Block", "Cross-entropy (nats)")
    assert report["cosine"].plot().data[0].colorbar.title.text == "Cosine similarity"
    exits = report["exit_curve"].plot()
    assert exits.layout.yaxis.title.text == "Threshold of the top probability"
    assert exits.data[0].colorbar.title.text == "Positions"
    for result in report.values():
        for picture in result.pictures:
            fig = result.plot(picture.field)
            for title in (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text):
                assert title[0].isupper(), (picture.field, title)
                assert "_" not in title, (picture.field, title)


@pytest.mark.parametrize("cls", result_classes(), ids=lambda cls: cls.__name__)
def test_a_field_that_a_report_draws_has_a_name_in_words(cls):
    drawn = {picture.field for picture in cls.pictures} & fields_of(cls).keys()
    missing = [field for field in drawn if field not in QUANTITIES and f"{cls.__name__}.{field}" not in QUANTITIES]
    # Stitches, single prompts and groups of models have figures of their own, which name their quantities.
    own = ("StitchResult", "StitchGrid", "CouplingMatrices", "ModelGrid", "Penalties", "GroupCurves", "GroupComparison")
    assert missing == [] or cls.__name__ in own


def test_the_tables_of_names_have_no_entry_that_no_result_has():
    fields = {cls: fields_of(cls) for cls in result_classes()}
    known = {name for named in fields.values() for name in named}
    known |= {f"{cls.__name__}.{name}" for cls, named in fields.items() for name in named}
    assert set(QUANTITIES) <= known
    assert set(AXES) <= {axis for named in fields.values() for axes in named.values() for axis in axes}


def test_titles_name_the_kind_of_sites_that_were_measured():
    model, tokens = tiny_llama(), random_tokens()
    heads = lsim.analyze(model, tokens, [lsim.CKA(minibatch=16)], at="z", per_head=True)["cka"].plot()
    assert heads.layout.title.text == "Linear CKA between heads"
    assert heads.layout.xaxis.tickangle == -90
    outputs = lsim.analyze(model, tokens, [lsim.Cosine(center="none")], at=["resid_post", "mlp_out"])["cosine"]
    assert outputs.plot("to_last").layout.title.text == "Cosine similarity to the last site"
    stream = lsim.analyze(model, tokens, [lsim.Cosine(center="none")])["cosine"]
    assert stream.plot("to_last").layout.title.text == "Cosine similarity to the last layer"
