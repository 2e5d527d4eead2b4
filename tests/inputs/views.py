"""Views of given numbers, which no model made, and results of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.analyzers import Analyzer, Needs, Run
from tl_layersim.core import Provenance, Sums
from tl_layersim.sources.model_description import ModelDescription

from .. import oracles
from .own_blocks import own_calls


def own_head(weight: np.ndarray = oracles.HEAD, dtype: torch.dtype = torch.float64):
    """A head of its own for views that no model made: a layer norm without weights, and an unembedding."""
    from tl_layersim.architectures.unembed import Unembed

    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=dtype)
    head.weight.data = torch.as_tensor(weight).to(dtype)
    norm = torch.nn.LayerNorm(weight.shape[1], elementwise_affine=False)
    return Unembed(norm, (head,), "every", 1.0, None, dtype, None, head)


def view(x: np.ndarray, tokens: np.ndarray | None = None, rows: int = 1, **more) -> View:
    """A view of given residuals `layer token d_model`, as one or more rows of equal length."""
    count = x.shape[1]
    ids = torch.as_tensor(oracles.tokens_of(count) if tokens is None else tokens)
    per_row = max(1, -(-count // rows))
    x = torch.as_tensor(x)
    more = {"unembed": own_head(dtype=x.dtype), "calls": own_calls(x) if rows == 1 else ()} | more
    return View(x, ids, torch.arange(count) // per_row, torch.arange(count) % per_row, **more)


def view_for(analyzer: Analyzer | type[Analyzer], x: np.ndarray, **more) -> View:
    """A view of given residuals with the sites that the analyzer reads, of several rows of the data."""
    count = x.shape[1]
    more = {"row": torch.arange(count) // oracles.ROWS_OF} | more
    if in_pools(analyzer):
        more = {"rows": -(-count // oracles.ROWS_OF)} | more
    return with_sublayers(view(x, **more), x) if declared(analyzer).families else view(x, **more)


def declared(analyzer: Analyzer | type[Analyzer]) -> Needs:
    """What an analyzer, or a class with default options, declares."""
    return (analyzer() if isinstance(analyzer, type) else analyzer).needs


def in_pools(analyzer: Analyzer | type[Analyzer]) -> bool:
    """Whether a measure draws its samples from several rows."""
    return (analyzer() if isinstance(analyzer, type) else analyzer).pool_need(1.0) > 0


def samples(x: np.ndarray, tokens: np.ndarray | None = None, **more) -> View:
    """A view of given residuals in which each sample is a row of its own."""
    return view(x, tokens, rows=x.shape[1], **more)


def with_sublayers(one: View, x: np.ndarray, parallel: bool = False, stack: str = "") -> View:
    """The view with the outputs of attention and MLP, family by family, and the stream between them in sequential blocks."""
    from tl_layersim.architectures.blocks import layer_names

    attention, mlp = oracles.sublayer_outputs(x)
    families = {"hook_attn_out": attention, "hook_mlp_out": mlp} | ({} if parallel else {"hook_resid_mid": x[:-1] + attention})
    names = [*layer_names(len(x) - 1), *(f"blocks.{i}.{hook}" for hook in families for i in range(len(x) - 1))]
    sites = torch.cat([one.activations, *(torch.as_tensor(y).to(one.activations) for y in families.values())])
    return replace(one, activations=sites, sites=tuple(f"{stack}{name}" for name in names))


def edited(x: np.ndarray) -> np.ndarray:
    """Residuals of an edited run: other ones from layer 2 on, and farther away with depth."""
    depth = np.maximum(np.arange(len(x)) - 1, 0)[:, None, None]
    return x + 0.4 * depth * np.roll(x, 1, axis=-1)


def views_of(analyzer: Analyzer | type[Analyzer], one: View) -> tuple[View, ...]:
    """The views that a kernel takes: one; or, of a clean and of an edited run."""
    if declared(analyzer).models != "two":
        return (one,)
    return one, replace(one, activations=torch.as_tensor(edited(one.activations.numpy())).to(one.activations), memo={})


def residuals(seed: int = 0, layers: int = 4, tokens: int = 40, width: int = 8) -> np.ndarray:
    """A random walk over layers, so that near layers are alike, with a common offset that centring must remove."""
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(layers, tokens, width)) * (1 + np.arange(layers))[:, None, None]
    return np.cumsum(steps, axis=0) + 2.0


def provenance(**changes) -> Provenance:
    fields = {
        "model": "m",
        "config_hash": "0",
        "weights_hash": "0",
        "source": "s",
        "basis": "b",
        "dtype": "torch.float32",
        "data": "0",
        "tokens": 1,
        "sequences": 1,
        "batches": 1,
        "seed": None,
        "options": {},
        "versions": {},
        "seconds": 0.0,
    }
    return Provenance(**(fields | changes))


def layer_run(*layers: int, first: Sums | None = None) -> Run:
    """The run of one model, or of two, with these numbers of residual layers."""
    from tl_layersim.architectures.blocks import layer_names

    return sites_run(*(layer_names(count - 1) for count in layers), first=first)


def sites_run(*names: tuple[str, ...], first: Sums | None = None) -> Run:
    return Run(tuple(map(described, names)), provenance(), first or Sums())


def described(layers: tuple[str, ...]) -> ModelDescription:
    about = dict.fromkeys(("name", "config_hash", "weights", "source", "basis", "dtype"), "")
    return ModelDescription(**about, tokenizer=None, vocabulary=None, context=None, layers=layers, d_model=None)


def from_views(analyzer: Analyzer, views: list[View]) -> lsim.Result:
    """What an analyzer makes of given batches: both passes, the sums, the result."""
    from tl_layersim.activations.view import reduce

    def total(kernel) -> Sums:
        sums = Sums()
        for one in views:
            sums = sums + Sums.of(reduce({"k": kernel}, *views_of(analyzer, one))[1]["k"])
        return sums

    first_kernel = analyzer.first_kernel()
    first = total(first_kernel) if first_kernel is not None else Sums()
    sums = total(analyzer.kernel(first))
    sites = views[0].sites
    return analyzer.compute(
        sums, sites_run(sites, first=first) if sites else layer_run(views[0].activations.shape[0], first=first)
    )


def worst(a: lsim.Result, b: lsim.Result) -> float:
    """The largest difference between two results of a kind, over all their fields."""

    def gap(x: torch.Tensor, y: torch.Tensor) -> float:
        assert torch.equal(x.isnan(), y.isnan())
        return float((x - y).nan_to_num(0).abs().max())

    return max(gap(getattr(a, name), getattr(b, name)) for name in a.tensor_fields() if getattr(a, name).numel())
