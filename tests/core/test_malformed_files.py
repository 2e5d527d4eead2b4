"""Files whose header or tensors are not what this package writes, with a checksum that fits: refused, never a traceback."""

from __future__ import annotations

import copy
import os
import random
from collections import Counter
from typing import Any

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.core import file_format
from tl_layersim.core.result_declarations import below

from ..inputs.views import from_views, residuals, view_for
from ..models.clip_models import clip_of, pairs
from ..models.detectors import scenes, tiny_detr
from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import FILES, RESULTS, read_checkpoint

DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
OTHERS = (None, True, -1, 7, 10**30, 0.5, float("nan"), "", "x", "a/b", [], {}, [1], ["x"], [["x", 1]], {"x": 1}, DEEP)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every container below a node with each of its keys."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
    entries = [(node, key) for key in keys]
    return entries + [place for key in keys for place in places(node[key])]


def mutated(header: dict[str, Any], tensors: dict[str, torch.Tensor], rng: random.Random) -> tuple[dict, dict]:
    """A header or a tensor changed in one place; format and kind stay."""
    header = copy.deepcopy(header)
    tensors = dict(tensors)
    changeable = [place for place in places(header) if place[0] is not header or place[1] not in ("format", "kind")]
    if tensors and (not changeable or rng.random() < 0.3):
        name = rng.choice(sorted(tensors))
        value = tensors.pop(name)
        change = rng.randrange(6)
        if change == 1:
            tensors[name + "x"] = value
        elif change == 2:
            tensors[name] = value.unsqueeze(0)
        elif change == 3:
            tensors[name] = value.reshape(-1)[:-1]
        elif change == 4:
            tensors[name] = value.to(torch.int32 if value.is_floating_point() else torch.float16)
        elif change == 5:
            tensors[name] = torch.full_like(value, float("nan") if value.is_floating_point() else 1)
        return header, tensors
    node, key = rng.choice(changeable)
    change = rng.randrange(6)
    if change == 0:
        del node[key]
    elif change == 1 and isinstance(node, list):
        node.append(copy.deepcopy(node[key]))
    elif change == 2 and isinstance(node, dict):
        node[rng.choice(("x", "values", "layers", "layer 1"))] = node.pop(key)
    else:
        node[key] = rng.choice(OTHERS)
    return header, tensors


SHAPES = {
    "observed": lambda ten: {"cka/observed": ten["cka/observed"][None]},
    "stray": lambda ten: {"cka/stray": ten["cka/values"]},
    "further": lambda ten: {"further/values": ten["cka/values"]},
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_tensor_that_is_wrong_is_named(name, tmp_path):
    header, tensors = file_format.read(FILES / "report.safetensors", ("report",))
    path = file_format.write(tmp_path / "x", "report", header | {"format": file_format.FORMAT}, tensors | SHAPES[name](tensors))
    with pytest.raises(lsim.LayersimError) as caught:
        lsim.load(path)
    assert name in str(caught.value)


def test_no_result_is_left_out(tmp_path):
    header, tensors = file_format.read(FILES / "report.safetensors", ("report",))
    with pytest.raises(lsim.LayersimError, match=r"\bx\b"):
        lsim.load(file_format.write(tmp_path / "x", "report", header | {"format": file_format.FORMAT, "results": {}}, tensors))
    empty = lsim.load(file_format.write(tmp_path / "x", "report", {"results": {}}, {}))
    assert (type(empty), len(empty)) == (lsim.Report, 0)


def test_a_path_with_a_zero_byte_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = lsim.load(FILES / "report.safetensors")
    model = tiny_llama()
    data = random_tokens(4)

    for call in (
        lambda: lsim.load("a\0b"),
        lambda: report.save("a\0b"),
        lambda: report.to_html("a\0b"),
        lambda: lsim.merge("a\0b"),
        lambda: lsim.analyze(model, data, "cka", checkpoint="a\0b"),
        lambda: lsim.truncate(model, 1, save_to="a\0b"),
    ):
        with pytest.raises(lsim.LayersimError):
            call()
    assert os.listdir() == []


@pytest.mark.light(
    "adapters.safetensors",
    "cosine.safetensors",
    "generation_quality.safetensors",
    "logit_lens.safetensors",
    "saturation.safetensors",
    "trajectory_pca.safetensors",
)
@pytest.mark.parametrize("name", RESULTS)
def test_a_malformed_result_is_refused_or_works(name, tmp_path):
    header, tensors = file_format.read(FILES / name, ("result", "report"))
    rng = random.Random(name)
    refused = 0
    worked = 0
    for _ in range(6):
        path = file_format.write(
            tmp_path / "x", header["kind"], *mutated(header | {"format": file_format.FORMAT}, tensors, rng)
        )
        try:
            lsim.load(path)
            worked += 1
        except lsim.LayersimError as error:
            refused += str(path) in str(error)

    # Each refusal names the file.
    assert refused + worked == 6


def uses(result):
    """All that a user does with a loaded result, but for figures."""
    report = lsim.Report({"a": result})
    yield repr(result)
    yield report.to_markdown()
    yield report.to_frame()
    yield result.to_xarray()
    yield report.headline()
    yield result.finding()
    yield result._repr_html_()
    for field, axes in result.tensor_fields().items():
        yield result.to_frame(field)
        if len(axes) in (1, 2):
            yield result.to_latex(field)


def figures(result):
    for picture in result.pictures:
        yield result.plot(picture.name)


MEASURES = sorted(find_analyzers())
# Results of classes that have no file.
FURTHER = {
    "cknna": lambda: result_of(lsim.MutualKNN(overlap="cknna")),
    "permutation": lambda: result_of(lsim.Procrustes(alignment="permutation")),
    "similarity": lambda: from_views(lsim.Similarity(mean_product), [view_for(lsim.MutualKNN, residuals(1))]),
    "model grid": lambda: lsim.compare_grid(dict.fromkeys("ab", tiny_llama()), random_tokens(4), lsim.CKA(minibatch=8)),
    "towers": lambda: lsim.vision.tower_similarity(clip_of(), pairs()),
    "detection": lambda: lsim.vision.detection_by_layer(tiny_detr(), scenes()),
}
RESULT_NAMES = [*MEASURES, *FURTHER, *(name for name in RESULTS if name != "report.safetensors")]


def mean_product(x: Any, y: Any) -> float:
    return float((x.mean(1) * y.mean(1)).mean())


def result_of(analyzer: Any) -> lsim.Result:
    return from_views(analyzer, [view_for(type(analyzer), residuals(1))])


def result_named(name: str) -> lsim.Result:
    """A small result: of an analyzer, or from a file of the tests."""
    if name in FURTHER:
        return FURTHER[name]()
    if name in MEASURES:
        return result_of(find_analyzers()[name]())
    return lsim.load(FILES / name)


def leaves(node: Any) -> list[tuple[Any, Any]]:
    """Each entry of a header; of a list, its first and its last item."""
    keys = list(node) if isinstance(node, dict) else sorted({0, len(node) - 1}) if isinstance(node, list) and node else []
    return [(node, key) for key in keys] + [place for key in keys for place in leaves(node[key])]


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RESULT_NAMES)
def test_an_entry_of_another_type_is_refused_or_every_use_works(name, tmp_path):
    """Over each entry of the header of each result class."""
    header, tensors = file_format.read(result_named(name).save(tmp_path / "result"), ("result",))
    content = {key: value for key, value in header.items() if key not in ("format", "kind")}
    rng = random.Random(name)
    outcomes = Counter()
    raw = []
    for number in range(len(leaves(content))):
        changed = copy.deepcopy(content)
        node, key = leaves(changed)[number]
        before = node[key]
        node[key] = rng.choice([replacement for replacement in OTHERS if replacement != before])
        file = file_format.write(tmp_path / "x", "result", changed, tensors)
        try:
            loaded = lsim.load(file)
        except lsim.LayersimError as error:
            outcomes["refused"] += str(file) in str(error)
            continue
        outcomes["works"] += 1
        try:
            repr(loaded)
            if rng.random() < 0.2:
                list(uses(loaded))
            if rng.random() < 0.05:
                list(figures(loaded))
        except Exception as error:
            raw.append((key, before, node[key], repr(error)))

    assert raw == []
    # Each refusal names the file.
    assert outcomes["refused"] + outcomes["works"] == number + 1
    assert outcomes["refused"] >= 10


@pytest.mark.heavy("builds every result")
def test_every_result_class_is_mutated():
    """But for abstract ones."""
    mutated_classes = {type(result_named(name)).__name__ for name in RESULT_NAMES}
    result_classes = {cls.__name__ for cls in below(lsim.Result) if cls.__module__.startswith("tl_layersim.")}
    assert result_classes - mutated_classes <= {"CalibratedMatrix", "MinibatchMatrix", "RegressionMetricsResult"}


@pytest.mark.light("adapters.checkpoint", "stitch_grid.checkpoint")
@pytest.mark.parametrize("name", sorted(path.name for path in [*FILES.glob("*.checkpoint"), *FILES.glob("*.run")]))
def test_a_malformed_checkpoint_is_refused_or_works(name, tmp_path):
    header, tensors = file_format.read(FILES / name, ("checkpoint", "stitches", "training", "remote_run"))
    assert read_checkpoint(FILES / name)

    rng = random.Random(name)
    refused = 0
    worked = 0
    content = {key: value for key, value in header.items() if key not in ("identity", "version")}
    for _ in range(20):
        changed, parts = mutated(content | {"format": file_format.FORMAT}, tensors, rng)
        identity = {key: header[key] for key in ("identity", "version") if key in header}
        path = file_format.write(tmp_path / "x", header["kind"], changed | identity, parts)
        try:
            read_checkpoint(path)
            worked += 1
        except lsim.LayersimError as error:
            refused += str(path) in str(error)

    # Each refusal names the file.
    assert refused + worked == 20
    # Of a training, `read_checkpoint` reads the curve alone.
    assert refused or header["kind"] == "training"
