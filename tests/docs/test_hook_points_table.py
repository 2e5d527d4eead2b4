"""The tables of docs/hook_points.md against the code: families, architectures and analyzers."""

from __future__ import annotations

import functools
import inspect
import re

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.architectures.blocks import anatomy_of, choose_stacks
from tl_layersim.architectures.hook_points import SITE_NAMES, SiteMap
from tl_layersim.architectures.layouts import LAYOUTS
from tl_layersim.architectures.site_selection import site_map

from ..architectures.site_cases import GROUPED, MODELS, TEXT, VISION
from .helpers import ROOT

PAGE = (ROOT / "docs/hook_points.md").read_text()
MORE = {
    "olmo3": ("Olmo3ForCausalLM", GROUPED),
    "xlm-roberta": ("XLMRobertaForMaskedLM", TEXT),
    "dinov2 registers": ("Dinov2WithRegistersForImageClassification", VISION),
}
# Names on the page, where they are not the names of the tiny models with capital letters, spaces or digits.
ARCHITECTURES = {
    "GPT-2": ["gpt2"],
    "GPT-J": ["gptj"],
    "GPT-NeoX": ["neox"],
    "GPT-NeoX (sequential)": ["neox sequential"],
    "Phi-3": ["phi3"],
    "OPT (post-norm)": ["opt post-norm"],
    "Bloom": ["bloom", "bloom from norms"],
    "Falcon": ["falcon", "falcon one norm", "falcon multi-query"],
    "Falcon (sequential)": ["falcon sequential"],
    "DINOv2": ["dinov2", "dinov2 gated", "dinov2 registers"],
    "T5": ["t5", "t5 gated"],
    "XLM-RoBERTa": ["xlm-roberta"],
    "DeBERTa v2": ["deberta-v2"],
    "DeBERTa v3": ["deberta-v3"],
    "BEiT (layer scale)": ["beit"],
    "BEiT": ["beit unscaled"],
    "Swin": ["swin"],
}


def keys_of(architecture: str) -> list[str]:
    return ARCHITECTURES.get(architecture, [architecture.lower().replace(" ", "")])


@functools.cache
def map_of(key: str) -> tuple[SiteMap, set[str]]:
    """The sites of a model without weights, and the classes of its blocks."""
    name, settings = (MODELS | MORE)[key]
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class(**settings))
    anatomy = choose_stacks(model, anatomy_of(model), None)
    return site_map(model, anatomy), {type(model.get_submodule(path)).__name__ for path in anatomy.blocks}


def table(first: str) -> list[dict[str, str]]:
    """The rows of the table on the page whose header begins with these cells, by column."""
    lines = PAGE.splitlines()
    [start] = [n for n, line in enumerate(lines) if line.startswith(f"| {first} |")]
    header, rows = cells(lines[start]), []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(header, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_table_of_families_has_every_family_with_its_name_and_module():
    rows = {row["family"].strip("`"): row for row in table("family | activations")}
    assert sorted(rows) == sorted(SITE_NAMES)
    sites = {site.family: site for site in map_of("llama")[0].sites if site.block != 1}
    for family, row in rows.items():
        assert row["name after `blocks.{i}.`"].removesuffix(", without a block") == f"`{SITE_NAMES[family]}`"
        module = row["module of a Llama block"]
        if family not in sites:
            assert module == "none"
            continue
        point = sites[family].point
        path = point.module.removeprefix("model.layers.0").removeprefix("model.").strip(".")
        assert module.startswith(f"`{path}` " if path else "the block "), module
        assert module.endswith("(input)" if point.incoming else "(output)"), module


@pytest.mark.heavy("every architecture")
def test_the_table_of_architectures_says_which_families_each_has():
    named = set()
    for row in table("architecture | `resid_pre` `resid_post`"):
        names = row.pop("architecture").split(", ")
        if names[0] == "any other":
            continue
        for key in (key for name in names for key in keys_of(name)):
            has = set(map_of(key)[0].families())
            named.add(key)
            for column, mark in row.items():
                families = set(re.findall(r"`(\w+)`", column))
                named_in_cell = set(re.findall(r"`(\w+)`", mark))
                assert mark in ("✓", "–") or named_in_cell < families
                assert has & families == (families if mark == "✓" else named_in_cell), (key, column)
    assert named == {*MODELS, *MORE}


def test_every_layout_is_on_the_page():
    known = {name for layout in LAYOUTS for name in layout.classes}
    assert known == {name for key in (*MODELS, *MORE) for name in map_of(key)[1]}


def sites_in_words(cls) -> str:
    needs = cls().needs
    if needs.families:
        return "attention and MLP outputs and the stream around them, whatever `at=` says"
    words = {
        "any": "any",
        "equal_width": "any of equal width",
        "stream": "the residual stream",
        "every_block": "the residual stream after every block",
    }
    return words[needs.sites] + (", with `resid_mid` too" if needs.resid_mid else "")


def test_the_table_of_analyzers_is_what_they_declare():
    rows = {name: row["sites"] for row in table("analyzer | sites") for name in re.findall(r"`(\w+)`", row["analyzer"])}
    classes = {cls.__name__: cls for cls in find_analyzers().values() if cls.__module__.startswith("tl_layersim.")}
    assert sorted(rows) == sorted(classes)
    for name, said in rows.items():
        assert said.split(":")[0] == sites_in_words(classes[name]), name


@pytest.mark.parametrize("call", ["analyze", "compare", "attach"])
def test_the_calls_on_the_page_take_at(call):
    assert {"at", "per_head"} <= set(inspect.signature(getattr(lsim, call)).parameters)


def test_families_that_the_page_says_are_refused_are_refused():
    for key, family, reason in (
        ("neox", "resid_mid", "parallel"),
        ("bert", "ln1", "norms stand after attention and MLP"),
        ("mixtral", "mlp_post", "each expert"),
        ("mamba", "z", "no heads"),
    ):
        assert reason in map_of(key)[0].lacks[family]
