"""The part of plotly.js that pages carry."""

from __future__ import annotations

import pytest
from plotly.offline import get_plotlyjs

from tl_layersim.reporting.plotly_bundle import UnknownStructure, plotly_bundle, split_statements, without_other_types

SMALL = """/* plotly.js */
(function(f){f()})(() => {
"use strict";var Plotly=(()=>{var c=(f)=>()=>f({exports:{}}),own=/[)}]/;function used(){return "})();"}\
function lost(){return helper()}function helper(){return `${used({a:"`"})}}`}\
var bar=c((e,m)=>{m={moduleType:"trace",name:"bar"};used()});var pie=c((e,m)=>{m={moduleType:"trace",name:"pie"};lost()});\
var again=c((e,m)=>{m.exports=pie()});var core=c(()=>{own.register([bar(),again()])});return core();})();
window.Plotly=Plotly;return Plotly});
""".replace("\\\n", "")


def test_statements_are_split_at_the_top_level_only():
    head, statements, tail = split_statements(SMALL)
    assert head.endswith("(()=>{")
    assert head + "".join(one.text for one in statements) + tail == SMALL
    assert [sorted(one.names) for one in statements] == [
        ["c", "own"], ["used"], ["lost"], ["helper"], ["bar"], ["pie"], ["again"], ["core"], [],
    ]  # fmt: skip


def test_a_part_has_what_its_types_need_and_nothing_else():
    bars = without_other_types(SMALL, frozenset({"bar"}))
    assert "register([bar()])" in bars
    assert "function used" in bars
    assert not any(word in bars for word in ("pie", "lost", "helper"))
    pies = without_other_types(SMALL, frozenset({"pie"}))
    assert "register([again()])" in pies
    assert all(word in pies for word in ("function lost", "function helper", "function used"))
    assert without_other_types(SMALL, frozenset({"bar", "pie"})) == SMALL


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("alert(1)", "does not define Plotly"),
        (SMALL.replace("own.register", "own.append"), "registers no trace types"),
        (SMALL.replace("var core=c(()=>{", "var core=c((]=>{"), "brackets do not match"),
        (SMALL[:-90], "does not end"),
        (SMALL.replace('name:"bar"', 'name:"bars"'), "it registers"),
    ],
)
def test_a_script_of_another_structure_is_not_cut(script, message):
    with pytest.raises(UnknownStructure, match=message):
        without_other_types(script, frozenset({"bar"}))


def test_the_installed_plotly_is_cut():
    whole = get_plotlyjs()
    assert len(without_other_types(whole, frozenset({"heatmap", "bar"}))) < 0.55 * len(whole)
    head, statements, tail = split_statements(whole)
    assert head + "".join(one.text for one in statements) + tail == whole


def test_a_page_has_all_of_plotly_where_it_cannot_be_cut(monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "another plotly")
    plotly_bundle.cache_clear()
    assert plotly_bundle(frozenset({"heatmap", "scatter"})) == "another plotly"
    plotly_bundle.cache_clear()
