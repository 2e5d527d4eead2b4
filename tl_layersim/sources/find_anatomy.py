"""Finds the anatomy of a model: records every module in one forward pass over one row, and solves for what adds up.

A fact holds only if the tensors of the recorded pass satisfy it. In half precision a sum must be reproduced to the last bit,
because rounding hides a wrong term there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..architectures.anatomy import Anatomy, BlockAnatomy, Sublayer
from ..architectures.layouts import BlockSum, ModuleTensor, Term
from ..architectures.output_heads import is_norm, without_hooks
from ..architectures.unembed import Head, Tail, rounding
from ..core.errors import LayersimError
from ..data.batches import Batch
from ..data.non_token_inputs import ROW_AXES
from .forward_arguments import shape_of_row
from .hooks import in_this_thread, on_enter, on_leave, temporary_hooks
from .model_description import Model

# Number of positions of the synthetic row.
POSITIONS = 8
# Number of samples of a synthetic recording, a quarter of a second in most models.
SAMPLES = 4000
# Words that name an MLP in the path of a module.
MLP_WORDS = frozenset({"mlp", "ff", "ffn", "feedforward"})
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
        length: length of the tuple that it returns; 0 for another output.
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
    length: int = 0

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


def synthetic_row(module: torch.nn.Module, model: Model) -> Batch:
    """A row of synthetic inputs of a model: tokens, without padding ids and ids that begin or end a text; or an image.

    Args:
        module: the model.
        model: the description of the same model.

    Raises:
        LayersimError: the size of an image is unknown.
    """
    if model.main_input in ROW_AXES:
        generator = torch.Generator().manual_seed(0)
        is_wave = model.main_input == "input_values"
        shape = (SAMPLES,) if is_wave else shape_of_row(module, model, model.main_input)
        values = torch.randn(1, *shape, generator=generator)
        one = torch.ones(1, 1, dtype=torch.bool)
        return Batch(torch.zeros(1, 1, dtype=torch.int64), one, one, 0, inputs={model.main_input: values}, has_tokens=False)
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
        run.length = len(output) if isinstance(output, tuple) else 0
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
    arithmetic = arithmetic_of(config, dtype)
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
    tail = tail_runs(recorded, last)
    norms = [run.path for run in tail if is_norm(run.module) and _equal(run.given, last.returned)]
    return Anatomy(
        blocks=tuple(by_path[path] for path in order),
        shape=() if last.returned is None else tuple(last.returned.shape),
        embedding=_returning(recorded, entering, first_runs[order[0]]),
        final_norm=norms[0] if norms else "",
        tail=tuple(run.path for run in tail),
    )


def tail_runs(recorded: RecordedForward, last: ModuleRun) -> list[ModuleRun]:
    """The outermost runs between the last block and the output of the model, in order."""
    runs = []
    for run in recorded.runs:
        if run.entered > last.left and run.around is not None and run.around.entered < last.entered:
            runs.append(run)
    return runs


def watched_head(recorded: RecordedForward, last_block: str, logits: Tensor, arithmetic: Arithmetic) -> Head | None:
    """The head as the chain of modules that a recorded forward pass runs after the last block; None if it is no chain.

    Each module reads what the one before returns, or a multiple of it.

    Args:
        recorded: the forward pass.
        last_block: path of the last block.
        logits: the logits of the model, `row pos vocabulary`.
        arithmetic: the multipliers that the configuration names.
    """
    last = recorded.of(last_block)[-1]
    current = last.returned
    norm = ""
    parts: list[str] = []
    scale = 1.0
    for run in tail_runs(recorded, last):
        factor = None if run.given is None or current is None else _multiple(run.given, current, arithmetic)
        if factor is None or run.returned is None:
            return None
        scale *= factor
        current = run.returned
        if not parts and not norm and is_norm(run.module) and factor == 1.0:
            norm = run.path
        elif factor == 1.0 or (isinstance(run.module, torch.nn.Linear) and run.module.bias is None):
            # A multiple of what a linear layer without a bias reads is a multiple of what it returns.
            parts.append(run.path)
        else:
            return None
    if not parts or current is None or current.shape != logits.shape:
        return None
    raw = current.double()
    for cap in (None, *arithmetic.multipliers):
        target = logits.double() if cap is None else cap * torch.atanh((logits.double() / cap).clamp(-1, 1))
        inner = bool(target.isfinite().all())
        factor = _multiple(target, raw, arithmetic) if inner else None
        if factor is not None:
            return Head(norm, tuple(parts), scale=scale * factor, soft_cap=cap)
    return None


def watched_tail(recorded: RecordedForward, paths: Sequence[str], model: Model, token: int) -> Head | None:
    """The head as the rest of the forward pass after the last block; None if no module runs there.

    Args:
        recorded: the forward pass.
        paths: paths of the blocks.
        model: the description of the model.
        token: the token id that stands for any input.
    """
    last = recorded.of(paths[-1])[-1]
    runs = tail_runs(recorded, last)
    norms = [run.path for run in runs if is_norm(run.module) and _equal(run.given, last.returned)]
    norm = norms[0] if norms else ""
    parts = tuple(run.path for run in runs if run.path != norm)
    if not parts or model.token_input != model.main_input:
        return None
    lengths = tuple(recorded.of(path)[-1].length for path in paths)
    tail = Tail(tuple(paths), lengths, model.token_input, token)
    # Any module behind the last block may be a norm, unless one reads the residual itself.
    return Head(norm, parts, hides_norm=not norm and any(is_norm(run.module) for run in runs), tail=tail)


def _multiple(tensor: Tensor, other: Tensor, arithmetic: Arithmetic) -> float | None:
    """The factor by which one tensor is a multiple of another; None if it is none."""
    if tensor.numel() != other.numel():
        return None
    ours, theirs = tensor.double().flatten(), other.double().flatten()
    size = float(theirs @ theirs)
    if not size:
        return None
    factor = arithmetic.named(float(ours @ theirs) / size)
    error = float((ours - factor * theirs).norm())
    return factor if factor and error <= rounding(arithmetic.dtype) * float(ours.norm()) else None


def _returning(recorded: RecordedForward, tensor: Tensor | None, before: ModuleRun) -> str:
    """Path of the first module that returns a tensor before a run; "" if there is none."""
    for run in recorded.runs:
        if run.left and run.left < before.entered and _equal(run.returned, tensor):
            return run.path
    return ""


def _equal(tensor: Tensor | None, other: Tensor | None) -> bool:
    return tensor is not None and other is not None and tensor.shape == other.shape and torch.equal(tensor, other)


def arithmetic_of(config: Any, dtype: torch.dtype) -> Arithmetic:
    """How sums of a model round, and the numbers of its configuration.

    Args:
        config: its configuration.
        dtype: dtype of its weights.
    """
    return Arithmetic(dtype, _numbers_in(config))


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

    def is_sum(
        self, total: Tensor, base: Tensor, terms: Sequence[Tensor], multipliers: Sequence[float], scale: float = 1.0
    ) -> tuple[bool, float]:
        """Whether a total is a base plus multiples of terms; and the error, relative to the largest norm among them."""
        if not scale > 0:
            return False, float("inf")
        total = total if scale == 1.0 else total.double() / scale
        added = [term.double() * multiplier for term, multiplier in zip(terms, multipliers, strict=True)]
        error = float((total.double() - base.double() - sum(added)).norm())
        sizes = [float(part.double().norm()) for part in (total, base, *added)]
        gap = error / max(*sizes, 1e-30)
        if not gap <= rounding(self.dtype):
            return False, gap
        if self.is_half:
            return scale == 1.0 and _reproduces(total, base, terms, multipliers), gap
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


@dataclass(frozen=True)
class Addition:
    """A verified addition: a total is a base plus multiples of module outputs, all of it times a scale.

    Attributes:
        total: place of the total.
        base: place of the stream to which the outputs are added.
        runs: the runs that return the terms, in the order in which they end.
        multipliers: the factor of each.
        scale: factor of the whole sum, such as the `layer_scalar` of Gemma 4.
        gap: error relative to the largest norm among total and terms.
    """

    total: ModuleTensor
    base: ModuleTensor
    runs: tuple[ModuleRun, ...]
    multipliers: tuple[float, ...]
    scale: float
    gap: float


@dataclass
class BlockFinder:
    """Finds which modules of a block add to the residual stream.

    Attributes:
        block: the run of the block.
        inside: the runs inside it, in the order in which they begin.
        arithmetic: how sums round.
        runs: number of times that the block runs.
        nearest: smallest gap of a sum that was tried.
    """

    block: ModuleRun
    inside: list[ModuleRun]
    arithmetic: Arithmetic
    runs: int
    nearest: float = float("inf")

    def find(self) -> BlockAnatomy:
        """The anatomy of the block, from its first run."""
        entering, leaving = self.block.given, self.block.returned
        if entering is None or leaving is None or entering.shape != leaving.shape or not leaving.is_floating_point():
            return BlockAnatomy(self.block.path, self.runs)
        ends_in_norm = any(_equal(norm.returned, leaving) for norm in self._norms())
        additions = self._additions(leaving, ModuleTensor("", False), self.block.left)
        if not additions:
            return BlockAnatomy(self.block.path, self.runs, norms="stream" if ends_in_norm else "none", gap=self.nearest)
        sublayers: list[Sublayer] = []
        sums: list[BlockSum] = []
        parallel = False
        families = self._families([run for addition in additions for run in addition.runs])
        for addition in additions:
            streams = self._streams(addition)
            assert streams is not None
            parallel |= len(streams) > 1 and set(streams) == {addition.base}
            names = families[len(sublayers) : len(sublayers) + len(streams)]
            terms = zip(names, addition.runs, addition.multipliers, streams, strict=True)
            added = [Sublayer(name, self._inner(run), multiplier, stream) for name, run, multiplier, stream in terms]
            sublayers += added
            sums += _sums(addition, added)
        return BlockAnatomy(
            self.block.path,
            self.runs,
            sublayers=tuple(sublayers),
            norms="stream" if ends_in_norm else self._place_of_norms(additions),
            parallel=parallel,
            sums=tuple(sums),
            gap=max(addition.gap for addition in additions),
        )

    def _additions(self, total: Tensor, place: ModuleTensor, end: int) -> list[Addition]:
        """The additions that lead from the stream that enters the block to a total, the earliest first; empty if unknown.

        The stream of most blocks is one sum. That of post-norm blocks continues from the output of each norm.

        Args:
            total: a residual stream inside the block.
            place: its place.
            end: place in the order of runs at which it is known.
        """
        entering = self.block.given
        assert entering is not None
        addition = self._addition(total, place, entering, ModuleTensor("", True), 0, end)
        if addition is not None:
            return [addition]
        for norm in reversed([run for run in self._norms() if run.left <= end and run.given is not None]):
            assert norm.given is not None
            if norm.returned is None or norm.returned.shape != total.shape or norm.given.shape != total.shape:
                continue
            behind = ModuleTensor(self._inner(norm), False)
            onto: list[Addition] = []
            if not torch.equal(norm.returned, total):
                addition = self._addition(total, place, norm.returned, behind, norm.left, end)
                if addition is None:
                    continue
                onto = [addition]
            if torch.equal(norm.given, entering):
                return onto
            before = self._additions(norm.given, ModuleTensor(self._inner(norm), True), norm.entered)
            return [*before, *onto] if before else []
        return []

    def _addition(
        self, total: Tensor, place: ModuleTensor, base: Tensor, base_place: ModuleTensor, start: int, end: int
    ) -> Addition | None:
        """The addition of the fewest module outputs, run after `start` and before `end`, that leads from a base to a total."""
        missing = (total.double() - base.double()).flatten()
        candidates = self._candidates(total, base, start, end)
        if not candidates or not bool(missing.any()):
            return None
        outputs = torch.stack([self._as_stream(run.returned, total).double().flatten() for run in candidates])
        for count in range(1, min(MOST_SUBLAYERS, len(candidates)) + 1):
            choices = torch.combinations(torch.arange(len(candidates)), count)
            for choice, fitted in _fitted(outputs, missing, choices):
                multipliers = [self.arithmetic.named(value) for value in fitted]
                runs = tuple(candidates[number] for number in choice)
                holds, gap = self._holds(total, base, runs, multipliers, 1.0)
                addition = Addition(place, base_place, runs, tuple(multipliers), 1.0, gap)
                if holds and self._streams(addition) is not None:
                    return addition
        for count in range(1, min(MOST_SUBLAYERS, len(candidates)) + 1):
            choices = torch.combinations(torch.arange(len(candidates)), count)
            for choice, scale in _scaled(outputs, total.double().flatten(), base.double().flatten(), choices):
                runs = tuple(candidates[number] for number in choice)
                holds, gap = self._holds(total, base, runs, [1.0] * count, scale)
                addition = Addition(place, base_place, runs, (1.0,) * count, scale, gap)
                if holds and self._streams(addition) is not None:
                    return addition
        return None

    def _holds(
        self, total: Tensor, base: Tensor, runs: Sequence[ModuleRun], multipliers: Sequence[float], scale: float
    ) -> tuple[bool, float]:
        terms = [self._as_stream(run.returned, total) for run in runs]
        holds, gap = self.arithmetic.is_sum(total, base, terms, multipliers, scale)
        self.nearest = min(self.nearest, gap)
        return holds, gap

    def _streams(self, addition: Addition) -> list[ModuleTensor] | None:
        """The stream to which each term of an addition is added; None if one of them reads another stream than that.

        Between two terms that read the same stream, as in a parallel block, there is none.
        """
        place = addition.base
        streams = [place]
        partial = self._at(place).double()
        for run, multiplier, following in zip(addition.runs, addition.multipliers, addition.runs[1:], strict=False):
            partial = partial + self._as_stream(run.returned, partial).double() * multiplier
            reading = self._reading(partial)
            if reading is not None:
                place = reading
            elif not self._reads(self._source(following), self._at(place)):
                return None
            streams.append(place)
        return streams

    def _reads(self, run: ModuleRun, stream: Tensor) -> bool:
        """Whether a module reads a stream, directly or behind a norm."""
        given = run.given
        if given is None or given.numel() != stream.numel():
            return False
        normed = [norm.returned for norm in self._norms() if norm.given is not None and _equal(norm.given, stream)]
        return any(torch.equal(given.flatten(), tensor.flatten()) for tensor in (stream, *normed) if tensor is not None)

    def _at(self, place: ModuleTensor) -> Tensor:
        """The tensor at a place in the block."""
        runs = [self.block] if not place.path else [run for run in self.inside if self._inner(run) == place.path]
        tensor = runs[0].given if place.incoming else runs[0].returned
        assert tensor is not None
        return tensor

    def _inner(self, run: ModuleRun) -> str:
        """Path of a run's module, relative to the block."""
        return run.path.removeprefix(f"{self.block.path}.")

    def _as_stream(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """A tensor with the axes of the residual stream; mixtures of experts join batch and positions."""
        assert tensor is not None
        return tensor.reshape(like.shape)

    def _norms(self) -> list[ModuleRun]:
        """The runs of norms inside the block."""
        return [run for run in self.inside if is_norm(run.module)]

    def _candidates(self, total: Tensor, base: Tensor, start: int, end: int) -> list[ModuleRun]:
        """Runs whose output may be a term of a sum, the outermost of those that return the same.

        A module that returns the total or the base adds nothing, and neither does a norm that reads the base.
        """
        fitting = []
        for run in self.inside:
            out = run.returned
            if out is None or not out.is_floating_point() or out.numel() != total.numel() or out.shape[-1] != total.shape[-1]:
                continue
            reads_base = is_norm(run.module) and _equal(run.given, base)
            if run.entered > start and run.left < end and not reads_base and bool(out.any()):
                fitting.append(run)
        fitting.sort(key=lambda run: (run.path.count("."), run.entered))
        chosen: list[ModuleRun] = []
        for run in fitting:
            tensor = self._as_stream(run.returned, total)
            known = [total, base, *(self._as_stream(other.returned, total) for other in chosen)]
            if not any(torch.equal(tensor, other) for other in known):
                chosen.append(run)
        return sorted(chosen[:MOST_CANDIDATES], key=lambda run: run.left)

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
        while is_norm(run.module) or _passes_on(run.module):
            before = [other for other in self.inside if other.left < run.entered and _equal(other.returned, run.given)]
            if not before:
                return run
            run = min(before, key=lambda other: other.path.count("."))
        return run

    def _place_of_norms(self, additions: Sequence[Addition]) -> Literal["before", "after", "both", "none"]:
        """Where normalisation sits in a block whose output is no norm's."""
        terms = [run for addition in additions for run in addition.runs]
        sources = [self._source(run) for run in terms]
        after = any(is_norm(run.module) for run in terms)
        before = any(_equal(source.given, norm.returned) for source in sources for norm in self._norms())
        if before and after:
            return "both"
        return "before" if before else "after" if after else "none"

    def _families(self, terms: list[ModuleRun]) -> list[str]:
        """Names of sublayers in TransformerLens; "" for those of which a block has several."""
        sources = [self._source(run) for run in terms]
        kinds = [self._family(source, [other for other in sources if other is not source]) for source in sources]
        names: list[str] = []
        for kind in kinds:
            alike = [other for other in kinds if other.family == kind.family]
            # Of several modules without mixing of positions, the only one that is called an MLP.
            alone = len(alike) == 1 or (kind.is_named and sum(other.is_named for other in alike) == 1)
            names.append(kind.family if alone else "")
        return names

    def _family(self, run: ModuleRun, others: list[ModuleRun]) -> Kind:
        """The kind of sublayer: by its name, or else by whether it mixes positions."""
        around: list[ModuleRun] = [run]
        while (outer := around[-1].around) is not None and outer is not self.block:
            # A module that contains another sublayer is not part of this one.
            if any(other.is_inside(outer) for other in others):
                break
            around.append(outer)
        names = [self._inner(part).rpartition(".")[2] for part in around]
        name = " ".join([*names, *(type(part.module).__name__ for part in around)]).lower()
        # Classes of a model such as Lfm2Moe have the name of a mixture of experts, whatever they compute.
        is_mixture = any("moe" in part or "expert" in part for part in names)
        # The name of the module itself says more than the names around it: `post_attention_ff` is an MLP.
        is_called_mlp = bool(MLP_WORDS.intersection(names[0].lower().split("_")))
        is_mlp = is_mixture or is_called_mlp or any(word in name for word in ("mlp", "feedforward", "feed_forward", "ffn"))
        # Before the test of positions: with keys of an earlier block, no position depends on what enters this one at others.
        if not is_called_mlp and ("attn" in name or "attention" in name):
            crosses = any(word in name for word in ("cross", "encoder_", "encdec"))
            return Kind("cross_attn_out" if crosses else "attn_out", True)
        if is_mlp:
            return Kind("mlp_out", True)
        return Kind("mlp_out" if all(_is_by_position(part) for part in around) else "mixer_out", False)


@dataclass(frozen=True)
class Kind:
    """The family of a sublayer, and whether the names of its modules say so."""

    family: str
    is_named: bool


def _fitted(outputs: Tensor, missing: Tensor, choices: Tensor) -> list[tuple[list[int], list[float]]]:
    """The choices of outputs whose multiples come nearest to a vector, with the fitted multipliers.

    Args:
        outputs: `candidate entry`.
        missing: `entry`.
        choices: `choice term`, indices of candidates.
    """
    products, shares = outputs @ outputs.T, outputs @ missing
    inner = products[choices[:, :, None], choices[:, None, :]]
    fitted = (torch.linalg.pinv(inner, hermitian=True) @ shares[choices][..., None])[..., 0]
    errors = missing @ missing - (fitted * shares[choices]).sum(-1)
    # Gram matrices round, so several of the best are tried in full.
    best = errors.argsort()[:3]
    return list(zip(choices[best].tolist(), fitted[best].tolist(), strict=True))


def _scaled(outputs: Tensor, total: Tensor, base: Tensor, choices: Tensor) -> list[tuple[list[int], float]]:
    """The choices of outputs whose sum with a base comes nearest to a multiple of a total, with the factor of the sum."""
    sums = base + outputs[choices].sum(1)
    sizes = (sums * sums).sum(-1).clamp(min=1e-30)
    factors = (sums @ total) / sizes
    errors = total @ total - factors * (sums @ total)
    best = errors.argsort()[:3]
    return list(zip(choices[best].tolist(), factors[best].tolist(), strict=True))


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
        before, after = (_first_tensor(module(*args, **kwargs)) for args, kwargs in (_with(run, given), _with(run, other)))
    # Modules of any library fail in any way when they run outside of their model.
    except Exception:
        return False
    if before is None or after is None or before.shape != after.shape or before.dim() < 2:
        return False
    return torch.allclose(before[..., 1:, :], after[..., 1:, :], rtol=1e-4, atol=1e-6)


def _with(run: ModuleRun, tensor: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a run, with another tensor in place of the first one."""
    place = next((number for number, value in enumerate(run.args) if isinstance(value, Tensor)), None)
    if place is not None:
        return (*run.args[:place], tensor, *run.args[place + 1 :]), run.kwargs
    name = next((name for name, value in run.kwargs.items() if isinstance(value, Tensor)), None)
    return run.args, run.kwargs if name is None else {**run.kwargs, name: tensor}


def _sums(addition: Addition, sublayers: Sequence[Sublayer]) -> list[BlockSum]:
    """The sums of an addition, one for each stream between its sublayers that a module reads."""
    sums: list[BlockSum] = []
    place = addition.base
    terms: list[Term] = [place]
    for sublayer in sublayers:
        if sublayer.stream is not None and sublayer.stream != place:
            place = sublayer.stream
            sums.append((place, tuple(terms)))
            terms = [place]
        terms.append(sublayer.tensor)
    total = addition.total if addition.scale == 1.0 else addition.total._replace(multiplier=1.0 / addition.scale)
    return [*sums, (total, tuple(terms))]
