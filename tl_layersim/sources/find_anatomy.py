"""Finds the anatomy of a model: records every module in one forward pass over one row, and solves for what adds up.

A fact holds only if the tensors of the recorded pass satisfy it. In half precision a sum must be reproduced to the last bit,
because rounding hides a wrong term there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..architectures.anatomy import Anatomy, BlockAnatomy, Sublayer
from ..architectures.layouts import BlockSum, ModuleTensor, Term
from ..architectures.output_heads import has_name_of_norm, without_hooks
from ..architectures.unembed import rounding
from ..core.errors import LayersimError
from ..data.batches import Batch
from .hooks import in_this_thread, on_enter, on_leave, temporary_hooks
from .model_description import Model

# Number of positions of the synthetic row.
POSITIONS = 8
# Largest number of sublayers of a block, and of module outputs among which they are looked for.
MOST_SUBLAYERS, MOST_CANDIDATES = 4, 24
# A term is part of a sum only if the error of the sum is below this share of the term.
SHARE_OF_TERM = 0.01
# Relative distance within which a fitted multiplier is one of the configuration's.
NEAR_MULTIPLIER = {True: 2e-2, False: 1e-4}


@dataclass
class ModuleRun:
    """A run of a module in a recorded forward pass.

    Attributes:
        path: path of the module.
        module: the module.
        args: its positional arguments.
        kwargs: its keyword arguments.
        around: the run inside which it runs; None for the model itself.
        entered: place in the order in which runs begin and end.
        left: place at which it ends; 0 if it did not end.
        given: copy of the first tensor among its arguments.
        returned: copy of the first tensor in its output.
    """

    path: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    around: ModuleRun | None
    entered: int
    left: int = 0
    given: Tensor | None = None
    returned: Tensor | None = None

    def is_inside(self, other: ModuleRun) -> bool:
        """Whether it runs inside another run."""
        return other.entered < self.entered and self.left < other.left


@dataclass
class RecordedForward:
    """The runs of all modules in one forward pass over one row.

    Attributes:
        runs: the runs, in the order in which they begin.
        output: output of the model; None if the forward pass failed at its end.
    """

    runs: list[ModuleRun] = field(default_factory=list)
    output: Any = None

    def of(self, path: str) -> list[ModuleRun]:
        """The runs of the module at a path."""
        return [run for run in self.runs if run.path == path]


def synthetic_row(model: Model) -> Batch:
    """A row of synthetic inputs of a model: tokens, without padding ids and ids that begin or end a text.

    Args:
        model: the description of the model.
    """
    special = {*model.pads, *model.starts, *model.ends}
    known = max(2, model.vocabulary or 2)
    generator = torch.Generator().manual_seed(0)
    ids = [number for number in torch.randint(0, known, (64,), generator=generator).tolist() if number not in special]
    tokens = torch.tensor([(ids or [0]) * POSITIONS])[:, :POSITIONS]
    every = torch.ones_like(tokens, dtype=torch.bool)
    # The decoder of an encoder-decoder reads what its encoder returns.
    inputs = {"input_ids": tokens} if model.token_input != "input_ids" else {}
    return Batch(tokens, every, every, 0, inputs=inputs)


def record_forward(module: torch.nn.Module, call: Callable[[], Any]) -> RecordedForward:
    """Run a forward pass and record every module.

    Args:
        module: the model.
        call: runs the forward pass.
    """
    recorded = RecordedForward()
    open_runs: list[ModuleRun] = []
    clock = itertools.count(1)

    def first_of(values: Any) -> Tensor | None:
        tensor = _first_tensor(values)
        # A copy, because models add in place.
        return None if tensor is None else tensor.detach().clone()

    with temporary_hooks() as handles:
        for path, part in module.named_modules():
            handles += _recording_hooks(path, part, recorded, open_runs, clock, first_of)
        recorded.output = call()
    return recorded


def _recording_hooks(
    path: str,
    module: torch.nn.Module,
    recorded: RecordedForward,
    open_runs: list[ModuleRun],
    clock: Iterator[int],
    first_of: Callable[[Any], Tensor | None],
) -> list[RemovableHandle]:
    def enter(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = ModuleRun(path, module, args, kwargs, open_runs[-1] if open_runs else None, next(clock))
        run.given = first_of((*args, *kwargs.values()))
        recorded.runs.append(run)
        open_runs.append(run)

    def leave(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        run = open_runs.pop()
        run.returned = first_of(output)
        run.left = next(clock)

    return [on_enter(module, in_this_thread(enter)), on_leave(module, in_this_thread(leave))]


def _first_tensor(values: Any) -> Tensor | None:
    """The first tensor in arguments or an output; None if there is none."""
    if isinstance(values, Tensor):
        return values
    parts: Any = values.values() if isinstance(values, Mapping) else values if isinstance(values, list | tuple) else ()
    return next((part for part in parts if isinstance(part, Tensor)), None)


def find_anatomy(recorded: RecordedForward, paths: Sequence[str], config: Any, dtype: torch.dtype) -> Anatomy:
    """The anatomy that a recorded forward pass shows.

    Args:
        recorded: the forward pass.
        paths: paths of the blocks.
        config: configuration of the model, whose numbers may be multipliers.
        dtype: dtype of the weights.

    Raises:
        LayersimError: a block did not run.
    """
    arithmetic = Arithmetic(dtype, _numbers_in(config))
    blocks: list[BlockAnatomy] = []
    first_runs: dict[str, ModuleRun] = {}
    for path in paths:
        runs = recorded.of(path)
        if not runs:
            raise LayersimError(f"`layers` has {path!r}, which does not run in a forward pass over one row.")
        first_runs[path] = runs[0]
        inside = [run for run in recorded.runs if run.is_inside(runs[0])]
        blocks.append(BlockFinder(runs[0], inside, arithmetic, len(runs)).find())
    order = sorted(paths, key=lambda path: first_runs[path].entered)
    by_path = {block.path: block for block in blocks}
    entering = first_runs[order[0]].given
    last = recorded.of(order[-1])[-1]
    tail = [run for run in recorded.runs if run.entered > last.left and run.around is not None and run.around.entered < last.entered]
    norms = [run.path for run in tail if has_name_of_norm(type(run.module)) and _equal(run.given, last.returned)]
    return Anatomy(
        blocks=tuple(by_path[path] for path in order),
        shape=() if last.returned is None else tuple(last.returned.shape),
        embedding=_returning(recorded, entering, first_runs[order[0]]),
        final_norm=norms[0] if norms else "",
        tail=tuple(run.path for run in tail),
    )


def _returning(recorded: RecordedForward, tensor: Tensor | None, before: ModuleRun) -> str:
    """Path of the first module that returns a tensor before a run; "" if there is none."""
    for run in recorded.runs:
        if run.left and run.left < before.entered and _equal(run.returned, tensor):
            return run.path
    return ""


def _equal(tensor: Tensor | None, other: Tensor | None) -> bool:
    return tensor is not None and other is not None and tensor.shape == other.shape and torch.equal(tensor, other)


def _numbers_in(config: Any) -> tuple[float, ...]:
    """The numbers in a configuration and their reciprocals, which may be multipliers; 1 first."""
    values = [value for value in vars(config).values() if isinstance(value, int | float)] if hasattr(config, "__dict__") else []
    numbers = [float(value) for value in values if not isinstance(value, bool) and value not in (0, 1)]
    return tuple(dict.fromkeys([1.0, *numbers, *(1.0 / number for number in numbers)]))


@dataclass(frozen=True)
class Arithmetic:
    """How sums of a model round, and the multipliers that its configuration names.

    Attributes:
        dtype: dtype of the weights.
        multipliers: numbers that may be multipliers.
    """

    dtype: torch.dtype
    multipliers: tuple[float, ...]

    @property
    def is_half(self) -> bool:
        """Whether rounding may hide a wrong term, so that a sum must be reproduced to the last bit."""
        return torch.finfo(self.dtype).eps > 1e-4

    def named(self, fitted: float) -> float:
        """The multiplier that was meant: one of the configuration's if it is near, else the fitted one."""
        near = min(self.multipliers, key=lambda number: abs(number - fitted))
        return near if abs(near - fitted) <= NEAR_MULTIPLIER[self.is_half] * abs(fitted) else fitted

    def is_sum(self, total: Tensor, base: Tensor, terms: Sequence[Tensor], multipliers: Sequence[float]) -> tuple[bool, float]:
        """Whether a total is a base plus multiples of terms; and the error, relative to the largest norm among them."""
        added = [term.double() * multiplier for term, multiplier in zip(terms, multipliers, strict=True)]
        error = float((total.double() - base.double() - sum(added)).norm())
        sizes = [float(part.double().norm()) for part in (total, base, *added)]
        gap = error / max(*sizes, 1e-30)
        if not gap <= rounding(self.dtype):
            return False, gap
        if self.is_half:
            return _reproduces(total, base, terms, multipliers), gap
        return error <= SHARE_OF_TERM * min(float(part.norm()) for part in added), gap


def _reproduces(total: Tensor, base: Tensor, terms: Sequence[Tensor], multipliers: Sequence[float]) -> bool:
    """Whether some order of additions in the model's dtype gives a total to the last bit."""
    scaled = [term if multiplier == 1.0 else term * multiplier for term, multiplier in zip(terms, multipliers, strict=True)]
    for order in itertools.permutations(scaled):
        onto_base = base
        for part in order:
            onto_base = onto_base + part
        together = order[0]
        for part in order[1:]:
            together = together + part
        if torch.equal(onto_base, total) or torch.equal(together + base, total):
            return True
    return False


@dataclass
class BlockFinder:
    """Finds which modules of a block add to the residual stream.

    Attributes:
        block: the run of the block.
        inside: the runs inside it, in the order in which they begin.
        arithmetic: how sums round.
        runs: number of times that the block runs.
    """

    block: ModuleRun
    inside: list[ModuleRun]
    arithmetic: Arithmetic
    runs: int

    def find(self) -> BlockAnatomy:
        """The anatomy of the block, from its first run."""
        entering, leaving = self.block.given, self.block.returned
        if entering is None or leaving is None or entering.shape != leaving.shape or not leaving.is_floating_point():
            return BlockAnatomy(self.block.path, self.runs)
        if torch.equal(entering, leaving):
            return BlockAnatomy(self.block.path, self.runs)
        candidates = self._candidates(leaving)
        ending_norms = [run for run in candidates if _is_norm(run) and _equal(self._as_stream(run.returned, leaving), leaving)]
        if ending_norms:
            return self._post_norm(ending_norms[0], candidates)
        return self._pre_norm(entering, leaving, candidates)

    def _pre_norm(self, entering: Tensor, leaving: Tensor, candidates: list[ModuleRun]) -> BlockAnatomy:
        """The anatomy of a block whose output is its input plus multiples of module outputs."""
        terms, multipliers, gap = self._terms(leaving, entering, candidates)
        if not terms:
            return BlockAnatomy(self.block.path, self.runs, gap=gap)
        streams: list[ModuleTensor | None] = [ModuleTensor("", True)]
        partial = entering.double()
        for run, multiplier in list(zip(terms, multipliers, strict=True))[:-1]:
            partial = partial + self._as_stream(run.returned, leaving).double() * multiplier
            streams.append(self._reading(partial))
        # A sublayer whose input is not the sum so far reads the stream that enters, as the others of a parallel block do.
        parallel = len(terms) > 1 and all(stream is None for stream in streams[1:])
        for place, stream in enumerate(streams):
            if stream is None:
                streams[place] = streams[place - 1]
        families = self._families(terms)
        sublayers = [
            Sublayer(family, self._inner(run), multiplier, stream)
            for family, run, multiplier, stream in zip(families, terms, multipliers, streams, strict=True)
        ]
        return BlockAnatomy(
            self.block.path,
            self.runs,
            sublayers=tuple(sublayers),
            norms=self._norms(terms),
            parallel=parallel,
            sums=_sums(sublayers),
            gap=gap,
        )

    def _post_norm(self, ending: ModuleRun, candidates: list[ModuleRun]) -> BlockAnatomy:
        """The anatomy of a block whose norms stand on the stream: each normalises the sum of a stream and a sublayer."""
        norms = [run for run in candidates if _is_norm(run) and run.left <= ending.left]
        steps: list[tuple[ModuleRun, ModuleRun, float, ModuleTensor]] = []
        largest = 0.0
        stream, place = self.block.given, ModuleTensor("", True)
        for norm in norms:
            total = norm.given
            if total is None or stream is None or total.shape != stream.shape:
                continue
            before = [run for run in candidates if run.left < norm.entered and run not in norms]
            terms, multipliers, gap = self._terms(total, stream, before, most=1)
            if not terms:
                if norm is ending:
                    return BlockAnatomy(self.block.path, self.runs, norms="stream", gap=gap)
                continue
            largest = max(largest, gap)
            steps.append((norm, terms[0], multipliers[0], place))
            stream, place = norm.returned, ModuleTensor(self._inner(norm), False)
        if not steps or steps[-1][0] is not ending:
            return BlockAnatomy(self.block.path, self.runs, norms="stream", gap=largest)
        families = self._families([term for _, term, _, _ in steps])
        sublayers: list[Sublayer] = []
        sums: list[BlockSum] = []
        for family, (norm, term, multiplier, before_term) in zip(families, steps, strict=True):
            sublayer = Sublayer(family, self._inner(term), multiplier, before_term)
            sublayers.append(sublayer)
            onto: Term = before_term if before_term.path else "resid_pre"
            sums.append((ModuleTensor(self._inner(norm), True), (onto, sublayer.tensor)))
        return BlockAnatomy(
            self.block.path, self.runs, sublayers=tuple(sublayers), norms="stream", sums=tuple(sums), gap=largest
        )

    def _inner(self, run: ModuleRun) -> str:
        """Path of a run's module, relative to the block."""
        return run.path.removeprefix(f"{self.block.path}.")

    def _as_stream(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """A tensor with the axes of the residual stream; mixtures of experts join batch and positions."""
        assert tensor is not None
        return tensor.reshape(like.shape)

    def _candidates(self, like: Tensor) -> list[ModuleRun]:
        """Runs inside the block whose output may be added to its stream, the outermost of those that return the same."""
        fitting = []
        for run in self.inside:
            out = run.returned
            if out is not None and out.is_floating_point() and out.numel() == like.numel() and out.shape[-1] == like.shape[-1]:
                fitting.append(run)
        fitting.sort(key=lambda run: (run.path.count("."), run.entered))
        chosen: list[ModuleRun] = []
        for run in fitting:
            tensor = self._as_stream(run.returned, like)
            if bool(tensor.any()) and not any(torch.equal(tensor, self._as_stream(other.returned, like)) for other in chosen):
                chosen.append(run)
        return sorted(chosen[:MOST_CANDIDATES], key=lambda run: run.left)

    def _terms(
        self, total: Tensor, base: Tensor, candidates: list[ModuleRun], most: int = MOST_SUBLAYERS
    ) -> tuple[list[ModuleRun], list[float], float]:
        """The fewest runs whose outputs, times multipliers, make up the difference of a total and a base; and the gap."""
        missing = (total.double() - base.double()).flatten()
        size = float(missing.norm())
        if not candidates or not size:
            return [], [], float("inf")
        outputs = torch.stack([self._as_stream(run.returned, total).double().flatten() for run in candidates])
        products, shares = outputs @ outputs.T, outputs @ missing
        nearest = float("inf")
        for count in range(1, min(most, len(candidates)) + 1):
            choices = torch.combinations(torch.arange(len(candidates)), count)
            inner = products[choices[:, :, None], choices[:, None, :]]
            fitted = (torch.linalg.pinv(inner, hermitian=True) @ shares[choices][..., None])[..., 0]
            explained = (fitted * shares[choices]).sum(-1)
            errors = (missing @ missing - explained).clamp(min=0).sqrt()
            # The products of the Gram matrix round at the square root of float64, so the best are tried in full.
            for choice in errors.argsort()[:3].tolist():
                runs = [candidates[number] for number in choices[choice].tolist()]
                multipliers = [self.arithmetic.named(value) for value in fitted[choice].tolist()]
                terms = [self._as_stream(run.returned, total) for run in runs]
                holds, gap = self.arithmetic.is_sum(total, base, terms, multipliers)
                nearest = min(nearest, gap)
                if holds:
                    return runs, multipliers, gap
        return [], [], nearest

    def _reading(self, stream: Tensor) -> ModuleTensor | None:
        """The input or output of a module that is a residual stream between sublayers; None if there is none."""
        allowed = rounding(self.arithmetic.dtype) * float(stream.norm())
        for incoming in (True, False):
            for run in sorted(self.inside, key=lambda run: (run.path.count("."), run.entered)):
                tensor = run.given if incoming else run.returned
                if tensor is None or tensor.shape != stream.shape or not tensor.is_floating_point():
                    continue
                if float((tensor.double() - stream).norm()) <= allowed:
                    return ModuleTensor(self._inner(run), incoming)
        return None

    def _source(self, run: ModuleRun) -> ModuleRun:
        """The run that computes what norms, dropouts and scales behind it pass on."""
        while _is_norm(run) or _passes_on(run.module):
            before = [other for other in self.inside if other.left < run.entered and _equal(other.returned, run.given)]
            if not before:
                return run
            run = min(before, key=lambda other: other.path.count("."))
        return run

    def _norms(self, terms: list[ModuleRun]) -> Any:
        """Where normalisation sits in a block whose norms are not on the stream."""
        after = any(_is_norm(run) for run in terms)
        norms = [run for run in self.inside if _is_norm(run)]
        sources = [self._source(term) for term in terms]
        before = any(_equal(source.given, norm.returned) for source in sources for norm in norms)
        if before and after:
            return "both"
        return "before" if before else "after" if after else "none"

    def _families(self, terms: list[ModuleRun]) -> list[str]:
        """Names of sublayers in TransformerLens; "" for further ones of a kind."""
        names: list[str] = []
        for run in terms:
            family = self._family(self._source(run))
            names.append("" if family in names else family)
        return names

    def _family(self, run: ModuleRun) -> str:
        """The kind of sublayer: what mixes no positions is an MLP; attention has its name."""
        name = f"{type(run.module).__name__} {self._inner(run)}".lower()
        if any(word in name for word in ("mlp", "feedforward", "feed_forward", "ffn")) or _is_by_position(run):
            return "mlp_out"
        if "attn" in name or "attention" in name:
            crosses = "cross" in name or "encoder" in name or "encdec" in name
            return "cross_attn_out" if crosses else "attn_out"
        return "mixer_out"


def _is_norm(run: ModuleRun) -> bool:
    return has_name_of_norm(type(run.module))


def _passes_on(module: torch.nn.Module) -> bool:
    """Whether a module has no parts and no matrix, like a dropout or a scale."""
    return not list(module.children()) and all(weight.dim() < 2 for weight in module.parameters())


def _is_by_position(run: ModuleRun) -> bool:
    """Whether a module computes each position from that position alone.

    It runs again with another vector at the first position: the outputs at the others must not change.
    """
    given = run.given
    if given is None or given.dim() < 2 or given.shape[-2] < 2:
        return False
    other = given.clone()
    other[..., 0, :] = given[..., 0, :].flip(-1)
    module = without_hooks(run.module)
    try:
        outputs = [_first_tensor(module(*_swapped(run.args, run.given, x), **_swapped_names(run.kwargs, x, run))) for x in (given, other)]
    except Exception:  # Modules of any library fail in any way when they run outside of their model.
        return False
    before, after = outputs
    if before is None or after is None or before.shape != after.shape or before.dim() < 2:
        return False
    return torch.allclose(before[..., 1:, :], after[..., 1:, :], rtol=1e-4, atol=1e-6)


def _swapped(args: tuple[Any, ...], given: Tensor | None, other: Tensor) -> tuple[Any, ...]:
    """Positional arguments with another first tensor."""
    place = next((number for number, value in enumerate(args) if isinstance(value, Tensor)), None)
    return args if place is None else (*args[:place], other, *args[place + 1 :])


def _swapped_names(kwargs: dict[str, Any], other: Tensor, run: ModuleRun) -> dict[str, Any]:
    """Keyword arguments with another first tensor, if no positional argument is a tensor."""
    if any(isinstance(value, Tensor) for value in run.args):
        return kwargs
    name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    return kwargs if name is None else {**kwargs, name: other}


def _sums(sublayers: Sequence[Sublayer]) -> tuple[BlockSum, ...]:
    """The additions of a block whose output is its input plus what sublayers add."""
    sums: list[BlockSum] = []
    onto: Term = "resid_pre"
    terms: list[Term] = [onto]
    place: ModuleTensor | None = ModuleTensor("", True)
    for sublayer in sublayers:
        if sublayer.stream is not None and sublayer.stream != place:
            sums.append((sublayer.stream, tuple(terms)))
            terms = [sublayer.stream]
            place = sublayer.stream
        terms.append(sublayer.tensor)
    return (*sums, ("resid_post", tuple(terms)))
