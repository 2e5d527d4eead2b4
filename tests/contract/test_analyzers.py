"""The laws, over every analyzer that is found. A new file in `tl_layersim/analyzers/` is under them without an edit here."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import nnsight
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnsight.intervention.serialization import dumps

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.analyzers import find_analyzers
from tl_layersim.core import Sums
from tl_layersim.core.intervals import aligned, bounds_of, with_and_without_blocks
from tl_layersim.core.result_declarations import declarations

from .. import oracles
from ..inputs.views import edited, from_views, in_pools, residuals, view_for, views_of, worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.runs import measured


@dataclass(frozen=True, eq=False)
class KernelAlignment(lsim.Similarity):
    """`Similarity` with a function, as no name selects it."""

    __doc__ = lsim.Similarity.__doc__

    function: Any = oracles.kernel_alignment


ANALYZERS = [*sorted(find_analyzers().items()), ("similarity", KernelAlignment)]
each_analyzer = pytest.mark.parametrize(("name", "cls"), ANALYZERS, ids=[name for name, _ in ANALYZERS])


def batches(seed: int, sizes: tuple[int, ...] = (12, 30, 7)) -> list[np.ndarray]:
    return [residuals(seed + i, tokens=size) for i, size in enumerate(sizes)]


def expected_of(name: str, cls, data: list[np.ndarray]) -> dict[str, np.ndarray]:
    """What the oracle gives; of measures over pairs of samples with the tokens of a row, of two models with both runs."""
    options = {"rows": oracles.ROWS_OF} if in_pools(cls) else {}
    options |= {"edited": [edited(x) for x in data]} if cls().needs.models == "two" else {}
    return getattr(oracles, f"oracle_{name}")(data, **options)


@each_analyzer
def test_it_has_a_name_a_summary_and_frozen_options(name, cls):
    analyzer = cls()
    assert analyzer.name == name
    assert len(cls.summary()) > 20
    with pytest.raises(AttributeError):
        analyzer.name_of_nothing = 1
    assert all(isinstance(key, str) for key in analyzer.options())


@each_analyzer
def test_order_and_grouping_of_batches_do_not_matter(name, cls):
    check_order_and_grouping(cls, seed=7, order=(3, 0, 4, 2, 1), cuts=2)


@pytest.mark.heavy("many orders")
@each_analyzer
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(5)), cuts=st.integers(1, 4))
def test_no_order_and_no_grouping_of_batches_matters(name, cls, seed, order, cuts):
    check_order_and_grouping(cls, seed, order, cuts)


def check_order_and_grouping(cls, seed, order, cuts):
    # Tokens of a batch differ from those of others, and come again within it.
    views = [
        view_for(cls, x, tokens=(np.arange(x.shape[1]) + 5 * i) % 13) for i, x in enumerate(batches(seed, (12, 30, 7, 9, 16)))
    ]
    analyzer = cls()
    whole = from_views(analyzer, views)
    shuffled = from_views(analyzer, [views[i] for i in order])
    # A standard deviation near 0 is the root of what rounding left.
    # Expodistance, squared for its spread, is as large as a token's norm is near to where it began.
    scale = max(
        1.0, *(float(getattr(whole, f).nan_to_num(0).abs().max()) for f in whole.tensor_fields() if getattr(whole, f).numel())
    )
    assert worst(whole, shuffled) < 1e-7 * scale

    first_kernel = analyzer.first_kernel()
    first = Sums()
    if first_kernel is not None:
        for view in views:
            first = first + Sums.of(reduce({"k": first_kernel}, *views_of(cls, view))[1]["k"])
    kernel = analyzer.kernel(first)
    sums = [Sums.of(reduce({"k": kernel}, *views_of(cls, view))[1]["k"]) for view in views]
    left_sum = sums[0]
    right_sum = Sums()
    for i, part in enumerate(sums[1:], start=1):
        if i < cuts:
            left_sum = left_sum + part
        else:
            right_sum = right_sum + part
    merged = Sums() + left_sum + (right_sum + Sums())
    for key, value in sums[0].fields.items():
        total = value + sum(part.fields.get(key, 0) for part in sums[1:])
        torch.testing.assert_close(merged[key], total, rtol=1e-12, atol=1e-12)


@pytest.mark.covering
@each_analyzer
@pytest.mark.parametrize("seed", range(3))
def test_it_equals_its_oracle(name, cls, seed):
    assert hasattr(oracles, f"oracle_{name}"), f"write oracle_{name}(batches) in tests/oracles/, in float64 NumPy"

    data = batches(seed)
    expected = expected_of(name, cls, data)
    result = from_views(cls(), [view_for(cls, x) for x in data])
    for field, value in expected.items():
        # Quantiles come from a histogram of 2000 bins over [-1, 1], or of bins of a hundredth of a decade.
        at, relative = (2e-3, 0.024) if result.tensor_fields()[field][:1] == ("quantile",) else (1e-9, 1e-9)
        relative = 0 if name == "cosine" and field != "norm_ratio_quantiles" else relative
        np.testing.assert_allclose(getattr(result, field).numpy(), value, atol=at, rtol=relative, err_msg=field)

    checked = set(expected)
    assert checked == set(result.tensor_fields()), "the oracle gives every field"


@pytest.mark.light(
    "block_coupling",
    "cka",
    "cosine",
    "exit_curve",
    "linear_predictivity",
    "logit_lens",
    "neural_collapse",
    "rsa",
    "skip_effect",
    "trajectory",
)
@each_analyzer
def test_float32_activations_give_the_oracle_to_float32(name, cls):
    data = batches(3)
    expected = expected_of(name, cls, data)
    result = from_views(cls(), [view_for(cls, x.astype(np.float32)) for x in data])
    np.testing.assert_allclose(result.values.numpy(), expected["values"], atol=2e-6, rtol=1e-5)


@each_analyzer
def test_padding_and_masked_positions_do_not_matter(name, cls):
    model = tiny_llama()
    rng = torch.Generator().manual_seed(5)
    lengths = (20, 13, 7, 18)
    rows = [random_tokens(1, n, seed=n)[0] for n in lengths]
    plain = measured(model, rows, cls())
    for side in ("left", "right"):
        tokens = torch.randint(3, 100, (4, 25), generator=rng)
        mask = torch.zeros(4, 25, dtype=torch.int64)
        for i, row in enumerate(rows):
            span = slice(25 - len(row), 25) if side == "left" else slice(0, len(row))
            tokens[i, span], mask[i, span] = row, 1
        padded = measured(model, {"input_ids": tokens, "attention_mask": mask}, cls())
        assert worst(plain, padded) == 0
        assert padded.provenance.tokens == sum(lengths)
        assert padded.provenance.data == plain.provenance.data


@each_analyzer
def test_a_result_survives_save_and_load_exactly(name, cls, tmp_path):
    result = from_views(cls(), [view_for(cls, x) for x in batches(1)])
    loaded = lsim.load(result.save(tmp_path / "result.safetensors"))
    assert type(loaded) is type(result)
    assert worst(result, loaded) == 0
    # Strides of a file's tensors: sums in another order differ in the last digit.
    assert all(getattr(stored, field).is_contiguous() for stored in (result, loaded) for field in result.tensor_fields())
    assert loaded.provenance == result.provenance
    assert (loaded.layers, loaded.headline()) == (result.layers, result.headline())

    report = lsim.Report({name: result})
    again = lsim.load(report.save(tmp_path / "report.safetensors"))
    assert list(again) == [name]
    assert worst(again[name], result) == 0


@pytest.mark.light("cka", "exit_curve", "neural_collapse")
@each_analyzer
def test_every_picture_is_drawn_and_explained(name, cls):
    result = from_views(cls(), [view_for(cls, x) for x in batches(1)])
    assert result.pictures
    for picture in result.pictures:
        fig = result.plot(picture.name)
        assert fig.data
        assert fig.layout.title.text == picture.title
        assert any(year in picture.caption for year in ("19", "20"))


@pytest.mark.light("block_coupling")
@each_analyzer
def test_every_field_has_every_view_or_a_sentence(name, cls, tmp_path):
    result = from_views(cls(), [view_for(cls, x) for x in batches(1)])
    table = result.to_xarray()
    for field, declaration in declarations(result).items():
        values = getattr(result, field)
        shown = result.values_name if field == "values" else field
        measured = values.numel() and not bool(values.isnan().all())
        assert len(result.to_frame(field)) == values.numel()
        assert (shown in table) == bool(measured)
        drawn = measured and (len(declaration.axes) in (1, 2) or declaration.drawn)
        if drawn:
            assert result.plot(field).data
        elif measured:
            with pytest.raises(lsim.LayersimError, match=repr(field)):
                result.plot(field)
        if len(declaration.axes) in (1, 2):
            assert result.to_latex(field).count(r"\\") == values.shape[0] + 1
            assert result.to_markdown(field).count("\n") == values.shape[0] + 1

    page = lsim.Report({name: result}).to_html(tmp_path / "page.html").read_text()

    assert page.count('data-figure="') >= len(result.pictures)


@pytest.mark.heavy("a process of its own")
def test_kernels_run_where_this_package_is_not_installed(tmp_path):
    kernels_and_views = {}
    for name, cls in find_analyzers().items():
        analyzer = cls()
        views = views_of(cls, view_for(cls, residuals(tokens=20)))
        first_kernel = analyzer.first_kernel()
        first = Sums() if first_kernel is None else Sums.of(first_kernel(*views))
        kernels_and_views[name] = [*([] if first_kernel is None else [first_kernel]), analyzer.kernel(first)], views
    nnsight.register("tl_layersim")
    # One after the other in one process, whose imports take its time; each is its own message, as of a request of its own.
    for name, arguments in kernels_and_views.items():
        (tmp_path / name).write_bytes(dumps((reduce, *arguments)))
    script = (
        "import sys, pathlib\n"
        "for name in ('tl_layersim', 'jaxtyping', 'beartype'): sys.modules[name] = None\n"
        "from nnsight.intervention.serialization import loads\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    print(path.name, end=' ', flush=True)\n"
        "    reduce, kernels, views = loads(path.read_bytes())\n"
        "    for kernel in kernels: out = reduce({'k': kernel}, *views)[1]['k']\n"
        "    print(sorted(out))\n"
    )
    process = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)

    assert process.returncode == 0, f"{process.stdout.splitlines()[-1]}: {process.stderr}"
    assert process.stdout.splitlines() == [
        f"{name} {sorted(reduce({'k': kernels[-1]}, *views)[1]['k'])}" for name, (kernels, views) in kernels_and_views.items()
    ]


@each_analyzer
def test_its_docstring_says_formula_source_and_example(name, cls):
    text = inspect.getdoc(cls)
    for part in ("$$", *(["Args:"] if fields(cls) else []), "Source:", "Examples:"):
        assert part in text, f"{cls.__name__} lacks {part}"


@each_analyzer
def test_not_a_number_is_named_with_its_layer(name, cls):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(lsim.LayersimError, match=r"in rows 0 to \d+(.|\n)*blocks\.1\.hook_resid_post"):
        measured(model, random_tokens(), cls())


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:Intervals of")
@each_analyzer
def test_every_field_has_an_interval(name, cls):
    """Blocks of two rows: an interval of each number, about the number, within the bounds of the field."""
    analyzer = cls()
    model = tiny_llama()
    data = [random_tokens(1, 18 + i % 5, seed=i)[0] for i in range(36)]
    plain = measured(model, lsim.Data(data, batch_size=2), analyzer)
    result = measured(model, lsim.Data(data, batch_size=2), analyzer, intervals=True)

    # Rows; of measures over pairs of samples, pools of 16 rows.
    assert len(result.block_tokens) == (3 if in_pools(cls) else 18)
    assert worst(plain, result) < 1e-5

    for field, bounds in bounds_of(result).items():
        if bounds is None:
            continue
        value, low, high, error = result.interval(field)
        defined = ~low.isnan()
        # Most numbers of most measures have one; histograms and counts of what is rare are 0 without some block.
        assert value.numel() == 0 or bool(defined.any()) or not bool(value.isfinite().any()), field
        assert bool((low <= value)[defined].all() and (value <= high)[defined].all())
        assert bool((low >= min(bounds[0], float(value.nan_to_num().min())))[defined].all()) if value.numel() else True
        assert bool((high <= max(bounds[1], float(value.nan_to_num().max())))[defined].all()) if value.numel() else True
        assert bool((error[defined] >= 0).all())
        # What a block changes depends on the blocks, also at a bound: its interval has a width, or there is none.
        values_of = partial(aligned, result=result, field=field)
        _, replicates = with_and_without_blocks(result, values_of, result.declared(field))
        spread = replicates.amax(0) - replicates.amin(0)
        assert not bool(((spread > 1e-9 * value.abs()) & (high == low)).any()), field
    moving = [f for f, b in bounds_of(result).items() if b is not None and bool((result.interval(f).error > 0).any())]

    assert "values" in moving

    # What differs in half of the rows depends on the rows: its interval has a width.
    half = measured(model, lsim.Data(data[:18], batch_size=2), analyzer)
    for field, bounds in bounds_of(result).items():
        value = getattr(result, field)
        half_value = getattr(half, field)
        # Counts are those of fewer rows.
        if bounds is not None and value.shape == half_value.shape and not result.declared(field).out_of:
            differs = (value - half_value).abs() > 1e-6 * value.abs()
            _, low, high, _ = result.interval(field)
            assert not bool((differs & (high == low)).any()), field
