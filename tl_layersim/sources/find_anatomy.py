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

from ..architectures.anatomy import BlockAnatomy, Sublayer, WatchedAnatomy
from ..architectures.layouts import BlockSum, ModuleTensor, Term
from ..architectures.output_heads import is_norm, without_hooks
from ..architectures.unembed import Head, Tail, rounding
from ..core.errors import LayersimError
from ..data.batches import Batch
from ..data.input_names import ROW_AXES
from .forward_arguments import shape_of_row
from .hooks import in_this_thread, on_enter, on_leave, temporary_hooks
from .model_description import ModelDescription

# Number of positions of the synthetic row.
POSITIONS = 8
# Number of samples of a synthetic recording, a quarter of a second in most models.
SAMPLES = 4000
# Words that name an MLP in the path of a module.
MLP_WORDS = frozenset({"mlp", "ff", "ffn", "feedforward"})
# Largest number of sublayers of a block, and of module outputs among which they are looked for. All choices are tried.
MOST_SUBLAYERS = 4
MOST_CANDIDATES = 24
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
        parent: the run inside which it runs; None for the model itself.
        start: place in the order in which runs begin and end.
        end: place at which it ends; 0 if it did not end.
        input: copy of the first tensor among its arguments.
        output: copy of the first tensor in its output.
        output_length: length of the tuple that it returns; 0 for another output.
    """

    path: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: ModuleRun | None
    start: int
    end: int = 0
    input: Tensor | None = None
    output: Tensor | None = None
    output_length: int = 0

    def is_inside(self, outer: ModuleRun) -> bool:
        """Whether it runs inside another run."""
        return outer.start < self.start and self.end < outer.end


@dataclass
class RecordedForward:
    """The runs of all modules in one forward pass over one row.

    Attributes:
        runs: the runs, in the order in which they begin.
        output: output of the model; None if the forward pass failed at its end.
    """

    runs: list[ModuleRun] = field(default_factory=list)
    output: Any = None

    def runs_of(self, path: str) -> list[ModuleRun]:
        """The runs of the module at a path."""
        return [run for run in self.runs if run.path == path]


def synthetic_row(module: torch.nn.Module, model: ModelDescription) -> Batch:
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
        placeholder = torch.zeros(1, 1, dtype=torch.int64)
        attention = torch.ones(1, 1, dtype=torch.bool)
        return Batch(placeholder, attention, attention, 0, inputs={model.main_input: values}, has_tokens=False)
    special_ids = {*model.pads, *model.starts, *model.ends}
    vocabulary = model.vocabulary or _smallest_embedding(module)
    generator = torch.Generator().manual_seed(0)
    random_ids = torch.randint(0, vocabulary, (64,), generator=generator).tolist()
    ids = [token for token in random_ids if token not in special_ids]
    tokens = torch.tensor([(ids or [0]) * POSITIONS])[:, :POSITIONS]
    attention = torch.ones_like(tokens, dtype=torch.bool)
    # The decoder of an encoder-decoder reads what its encoder returns.
    inputs = {"input_ids": tokens} if model.token_input != "input_ids" else {}
    return Batch(tokens, attention, attention, 0, inputs=inputs)


def _smallest_embedding(module: torch.nn.Module) -> int:
    """Number of ids that every embedding of a module takes; 2 if it has none."""
    sizes = [part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding)]
    return min(sizes, default=2)


def record_forward(module: torch.nn.Module, call: Callable[[], Any], without_inside_of: Sequence[str] = ()) -> RecordedForward:
    """Run a forward pass and record every module.

    Args:
        module: the model.
        call: runs the forward pass.
        without_inside_of: paths of modules of which no submodule is recorded, because copies of all tensors take memory.
    """
    recorded = RecordedForward()
    open_runs: list[ModuleRun] = []
    clock = itertools.count(1)

    with temporary_hooks() as handles:
        for path, submodule in module.named_modules():
            if path.startswith(tuple(f"{outer}." for outer in without_inside_of)):
                continue
            handles += _recording_hooks(path, submodule, recorded, open_runs, clock)
        recorded.output = call()
    return recorded


def _recording_hooks(
    path: str,
    module: torch.nn.Module,
    recorded: RecordedForward,
    open_runs: list[ModuleRun],
    clock: Iterator[int],
) -> list[RemovableHandle]:
    """Hooks that record the runs of one module.

    Args:
        path: path of the module.
        module: the module.
        recorded: the forward pass to which runs are added.
        open_runs: the runs that have begun and not ended, the innermost last.
        clock: counts the beginnings and ends of runs.
    """

    def enter(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parent = open_runs[-1] if open_runs else None
        run = ModuleRun(path, module, args, kwargs, parent, next(clock))
        run.input = _copy_of_first_tensor((*args, *kwargs.values()))
        recorded.runs.append(run)
        open_runs.append(run)

    def leave(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        run = open_runs.pop()
        run.output = _copy_of_first_tensor(output)
        run.output_length = len(output) if isinstance(output, tuple) else 0
        run.end = next(clock)

    return [on_enter(module, in_this_thread(enter)), on_leave(module, in_this_thread(leave))]


def _copy_of_first_tensor(values: Any) -> Tensor | None:
    """A copy of the first tensor in arguments or an output, because models add in place; None if there is none."""
    tensor = _first_tensor(values)
    return None if tensor is None else tensor.detach().clone()


def _first_tensor(values: Any) -> Tensor | None:
    """The first tensor in arguments or an output; None if there is none."""
    if isinstance(values, Tensor):
        return values
    items: Any = ()
    if isinstance(values, Mapping):
        items = values.values()
    elif isinstance(values, list | tuple):
        items = values
    return next((item for item in items if isinstance(item, Tensor)), None)


def find_anatomy(recorded: RecordedForward, paths: Sequence[str], config: Any, dtype: torch.dtype) -> WatchedAnatomy:
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
        runs = recorded.runs_of(path)
        if not runs:
            raise LayersimError(f"`layers` has {path!r}, which does not run in a forward pass over one row.")
        first_run = runs[0]
        first_runs[path] = first_run
        inner_runs = [run for run in recorded.runs if run.is_inside(first_run)]
        finder = BlockFinder(first_run, inner_runs, arithmetic, len(runs))
        blocks.append(finder.find())
    order = sorted(paths, key=lambda path: first_runs[path].start)
    by_path = {block.path: block for block in blocks}
    first_block_run = first_runs[order[0]]
    last_block_run = recorded.runs_of(order[-1])[-1]
    tail = tail_runs(recorded, last_block_run)
    residual = last_block_run.output
    return WatchedAnatomy(
        blocks=tuple(by_path[path] for path in order),
        shape=() if residual is None else tuple(residual.shape),
        embedding=_first_path_returning(recorded, first_block_run.input, first_block_run),
        final_norm=_norm_of_residual(tail, residual),
        tail=tuple(run.path for run in tail),
    )


def _norm_of_residual(tail: Sequence[ModuleRun], residual: Tensor | None) -> str:
    """Path of the first norm after the last block that reads the block's output; "" if there is none."""
    for run in tail:
        if is_norm(run.module) and _equal(run.input, residual):
            return run.path
    return ""


def tail_runs(recorded: RecordedForward, last_block_run: ModuleRun) -> list[ModuleRun]:
    """The outermost runs between the last block and the output of the model, in order."""
    runs = []
    for run in recorded.runs:
        is_after_block = run.start > last_block_run.end
        # A run is an outermost one if its parent began before the block, as the model itself did.
        if is_after_block and run.parent is not None and run.parent.start < last_block_run.start:
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
    last_block_run = recorded.runs_of(last_block)[-1]
    hidden = last_block_run.output
    norm = ""
    parts: list[str] = []
    scale = 1.0
    for run in tail_runs(recorded, last_block_run):
        factor = None if run.input is None or hidden is None else _factor_between(run.input, hidden, arithmetic)
        if factor is None or run.output is None:
            return None
        scale *= factor
        hidden = run.output
        if not parts and not norm and is_norm(run.module) and factor == 1.0:
            norm = run.path
        elif factor == 1.0 or (isinstance(run.module, torch.nn.Linear) and run.module.bias is None):
            # A multiple of what a linear layer without a bias reads is a multiple of what it returns.
            parts.append(run.path)
        else:
            return None
    if not parts or hidden is None or hidden.shape != logits.shape:
        return None
    raw_logits = hidden.double()
    for soft_cap in (None, *arithmetic.multipliers):
        uncapped = logits.double()
        if soft_cap is not None:
            uncapped = soft_cap * torch.atanh((uncapped / soft_cap).clamp(-1, 1))
        # Logits at or above a cap have no finite inverse, so that it is not the cap of the model.
        if not bool(uncapped.isfinite().all()):
            continue
        factor = _factor_between(uncapped, raw_logits, arithmetic)
        if factor is not None:
            return Head(norm, tuple(parts), scale=scale * factor, soft_cap=soft_cap)
    return None


def watched_tail(recorded: RecordedForward, paths: Sequence[str], model: ModelDescription, token: int) -> Head | None:
    """The head as the rest of the forward pass after the last block; None if no module runs there.

    Args:
        recorded: the forward pass.
        paths: paths of the blocks.
        model: the description of the model.
        token: the token id that stands for any input.
    """
    last_block_run = recorded.runs_of(paths[-1])[-1]
    runs = tail_runs(recorded, last_block_run)
    norm = _norm_of_residual(runs, last_block_run.output)
    parts = tuple(run.path for run in runs if run.path != norm)
    if not parts or model.token_input != model.main_input:
        return None
    lengths = tuple(recorded.runs_of(path)[-1].output_length for path in paths)
    tail = Tail(tuple(paths), lengths, model.token_input, token)
    # Any module behind the last block may be a norm, unless one reads the residual itself.
    return Head(norm, parts, hides_norm=not norm and any(is_norm(run.module) for run in runs), tail=tail)


def _factor_between(multiple: Tensor, base: Tensor, arithmetic: Arithmetic) -> float | None:
    """The factor by which one tensor is a multiple of another; None if it is none."""
    if multiple.numel() != base.numel():
        return None
    multiple = multiple.double().flatten()
    base = base.double().flatten()
    squared_norm = float(base @ base)
    if not squared_norm:
        return None
    factor = arithmetic.named(float(multiple @ base) / squared_norm)
    error = float((multiple - factor * base).norm())
    is_multiple = error <= rounding(arithmetic.dtype) * float(multiple.norm())
    return factor if factor and is_multiple else None


def _first_path_returning(recorded: RecordedForward, tensor: Tensor | None, next_run: ModuleRun) -> str:
    """Path of the first module that returns a tensor before a run; "" if there is none."""
    for run in recorded.runs:
        if run.end and run.end < next_run.start and _equal(run.output, tensor):
            return run.path
    return ""


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)


def arithmetic_of(config: Any, dtype: torch.dtype) -> Arithmetic:
    """How sums of a model round, and the numbers of its configuration.

    Args:
        config: its configuration.
        dtype: dtype of its weights.
    """
    return Arithmetic(dtype, _numbers_in(config))


def _numbers_in(config: Any) -> tuple[float, ...]:
    """The numbers in a configuration and their reciprocals, which may be multipliers; 1 first."""
    numbers: list[float] = []
    for value in vars(config).values() if hasattr(config, "__dict__") else ():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value not in (0, 1):
            numbers.append(float(value))
    reciprocals = [1.0 / number for number in numbers]
    return tuple(dict.fromkeys([1.0, *numbers, *reciprocals]))


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
        nearest = min(self.multipliers, key=lambda number: abs(number - fitted))
        is_near = abs(nearest - fitted) <= NEAR_MULTIPLIER[self.is_half] * abs(fitted)
        return nearest if is_near else fitted

    def is_sum(
        self, total: Tensor, base: Tensor, terms: Sequence[Tensor], multipliers: Sequence[float], scale: float = 1.0
    ) -> tuple[bool, float]:
        """Whether a total is a base plus multiples of terms; and the error, relative to the largest norm among them."""
        if not scale > 0:
            return False, float("inf")
        total = total if scale == 1.0 else total.double() / scale
        scaled_terms = [term.double() * multiplier for term, multiplier in zip(terms, multipliers, strict=True)]
        error = float((total.double() - base.double() - sum(scaled_terms)).norm())
        norms = [float(tensor.double().norm()) for tensor in (total, base, *scaled_terms)]
        gap = error / max(*norms, 1e-30)
        # A gap that is NaN is too large as well.
        if not gap <= rounding(self.dtype):
            return False, gap
        if self.is_half:
            return scale == 1.0 and _is_exact_sum(total, base, terms, multipliers), gap
        smallest_term = min(float(term.norm()) for term in scaled_terms)
        return error <= SHARE_OF_TERM * smallest_term, gap


def _is_exact_sum(total: Tensor, base: Tensor, terms: Sequence[Tensor], multipliers: Sequence[float]) -> bool:
    """Whether some order of additions in the model's dtype gives a total to the last bit."""
    scaled_terms: list[Tensor] = []
    for term, multiplier in zip(terms, multipliers, strict=True):
        scaled_terms.append(term if multiplier == 1.0 else term * multiplier)
    for order in itertools.permutations(scaled_terms):
        # Models add each term to the stream, or add the terms first, as parallel blocks do.
        one_by_one = base
        for term in order:
            one_by_one = one_by_one + term
        sum_of_terms = order[0]
        for term in order[1:]:
            sum_of_terms = sum_of_terms + term
        if torch.equal(one_by_one, total) or torch.equal(sum_of_terms + base, total):
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
        inner_runs: the runs inside it, in the order in which they begin.
        arithmetic: how sums round.
        runs: number of times that the block runs.
        nearest: smallest gap of a sum that was tried.
    """

    block: ModuleRun
    inner_runs: list[ModuleRun]
    arithmetic: Arithmetic
    runs: int
    nearest: float = float("inf")

    def find(self) -> BlockAnatomy:
        """The anatomy of the block, from its first run."""
        entering = self.block.input
        leaving = self.block.output
        if entering is None or leaving is None or entering.shape != leaving.shape or not leaving.is_floating_point():
            return BlockAnatomy(self.block.path, self.runs)
        ends_in_norm = any(_equal(norm.output, leaving) for norm in self._norms())
        additions = self._find_additions(leaving, ModuleTensor("", False), self.block.end)
        if not additions:
            return BlockAnatomy(self.block.path, self.runs, norms="stream" if ends_in_norm else "none", gap=self.nearest)
        terms: list[ModuleRun] = []
        for addition in additions:
            terms += addition.runs
        families = self._family_names(terms)
        sublayers: list[Sublayer] = []
        sums: list[BlockSum] = []
        parallel = False
        for addition in additions:
            streams = self._streams_of_terms(addition)
            assert streams is not None
            parallel |= len(streams) > 1 and set(streams) == {addition.base}
            names = families[len(sublayers) : len(sublayers) + len(streams)]
            added_sublayers: list[Sublayer] = []
            for name, run, multiplier, stream in zip(names, addition.runs, addition.multipliers, streams, strict=True):
                added_sublayers.append(Sublayer(name, self._path_in_block(run), multiplier, stream))
            sublayers += added_sublayers
            sums += _block_sums(addition, added_sublayers)
        return BlockAnatomy(
            self.block.path,
            self.runs,
            sublayers=tuple(sublayers),
            norms="stream" if ends_in_norm else self._place_of_norms(terms),
            parallel=parallel,
            sums=tuple(sums),
            gap=max(addition.gap for addition in additions),
        )

    def _find_additions(self, total: Tensor, place: ModuleTensor, end: int) -> list[Addition]:
        """The additions that lead from the stream that enters the block to a total, the earliest first; empty if unknown.

        The stream of most blocks is one sum. That of post-norm blocks continues from the output of each norm.

        Args:
            total: a residual stream inside the block.
            place: its place.
            end: place in the order of runs at which it is known.
        """
        entering = self.block.input
        assert entering is not None
        addition = self._find_addition(total, place, entering, ModuleTensor("", True), 0, end)
        if addition is not None:
            return [addition]
        for norm in reversed([run for run in self._norms() if run.end <= end and run.input is not None]):
            assert norm.input is not None
            if norm.output is None or norm.output.shape != total.shape or norm.input.shape != total.shape:
                continue
            path = self._path_in_block(norm)
            onto_norm: list[Addition] = []
            if not torch.equal(norm.output, total):
                addition = self._find_addition(total, place, norm.output, ModuleTensor(path, False), norm.end, end)
                if addition is None:
                    continue
                onto_norm = [addition]
            if torch.equal(norm.input, entering):
                return onto_norm
            up_to_norm = self._find_additions(norm.input, ModuleTensor(path, True), norm.start)
            return [*up_to_norm, *onto_norm] if up_to_norm else []
        return []

    def _find_addition(
        self, total: Tensor, place: ModuleTensor, base: Tensor, base_place: ModuleTensor, start: int, end: int
    ) -> Addition | None:
        """The addition of the fewest module outputs, run after `start` and before `end`, that leads from a base to a total."""
        missing = (total.double() - base.double()).flatten()
        candidates = self._candidates(total, base, start, end)
        if not candidates or not bool(missing.any()):
            return None
        outputs = torch.stack([self._as_stream(run.output, total).double().flatten() for run in candidates])
        most = min(MOST_SUBLAYERS, len(candidates))
        # Multiples of the outputs.
        for count in range(1, most + 1):
            choices = torch.combinations(torch.arange(len(candidates)), count)
            for choice, fitted in _best_multiples(outputs, missing, choices):
                multipliers = [self.arithmetic.named(factor) for factor in fitted]
                runs = tuple(candidates[number] for number in choice)
                holds, gap = self._try_sum(total, base, runs, multipliers, 1.0)
                addition = Addition(place, base_place, runs, tuple(multipliers), 1.0, gap)
                if holds and self._streams_of_terms(addition) is not None:
                    return addition
        # A multiple of the whole sum.
        for count in range(1, most + 1):
            choices = torch.combinations(torch.arange(len(candidates)), count)
            for choice, scale in _best_scales(outputs, total.double().flatten(), base.double().flatten(), choices):
                runs = tuple(candidates[number] for number in choice)
                holds, gap = self._try_sum(total, base, runs, [1.0] * count, scale)
                addition = Addition(place, base_place, runs, (1.0,) * count, scale, gap)
                if holds and self._streams_of_terms(addition) is not None:
                    return addition
        return None

    def _try_sum(
        self, total: Tensor, base: Tensor, runs: Sequence[ModuleRun], multipliers: Sequence[float], scale: float
    ) -> tuple[bool, float]:
        terms = [self._as_stream(run.output, total) for run in runs]
        holds, gap = self.arithmetic.is_sum(total, base, terms, multipliers, scale)
        self.nearest = min(self.nearest, gap)
        return holds, gap

    def _streams_of_terms(self, addition: Addition) -> list[ModuleTensor] | None:
        """The stream to which each term of an addition is added; None if one of them reads another stream than that.

        Between two terms that read the same stream, as in a parallel block, there is none.
        """
        place = addition.base
        streams = [place]
        partial_sum = self._tensor_at(place).double()
        for run, multiplier, next_run in zip(addition.runs, addition.multipliers, addition.runs[1:], strict=False):
            partial_sum = partial_sum + self._as_stream(run.output, partial_sum).double() * multiplier
            place_of_sum = self._place_of(partial_sum)
            if place_of_sum is not None:
                place = place_of_sum
            elif not self._reads_stream(self._source_run(next_run), self._tensor_at(place)):
                return None
            streams.append(place)
        return streams

    def _reads_stream(self, run: ModuleRun, stream: Tensor) -> bool:
        """Whether a module reads a stream, directly or behind a norm."""
        if run.input is None or run.input.numel() != stream.numel():
            return False
        streams = [stream]
        for norm in self._norms():
            if norm.output is not None and _equal(norm.input, stream):
                streams.append(norm.output)
        return any(torch.equal(run.input.flatten(), tensor.flatten()) for tensor in streams)

    def _tensor_at(self, place: ModuleTensor) -> Tensor:
        """The tensor at a place in the block."""
        runs = [self.block]
        if place.path:
            runs = [run for run in self.inner_runs if self._path_in_block(run) == place.path]
        tensor = runs[0].input if place.incoming else runs[0].output
        assert tensor is not None
        return tensor

    def _path_in_block(self, run: ModuleRun) -> str:
        """Path of a run's module, relative to the block."""
        return run.path.removeprefix(f"{self.block.path}.")

    def _as_stream(self, tensor: Tensor | None, like: Tensor) -> Tensor:
        """A tensor with the axes of the residual stream; mixtures of experts join batch and positions."""
        assert tensor is not None
        return tensor.reshape(like.shape)

    def _norms(self) -> list[ModuleRun]:
        """The runs of norms inside the block."""
        return [run for run in self.inner_runs if is_norm(run.module)]

    def _candidates(self, total: Tensor, base: Tensor, start: int, end: int) -> list[ModuleRun]:
        """Runs whose output may be a term of a sum, the outermost of those that return the same.

        A module that returns the total or the base adds nothing, and neither does a norm that reads the base.
        """
        possible_terms = []
        for run in self.inner_runs:
            output = run.output
            if output is None or not output.is_floating_point():
                continue
            if output.numel() != total.numel() or output.shape[-1] != total.shape[-1]:
                continue
            reads_base = is_norm(run.module) and _equal(run.input, base)
            if run.start > start and run.end < end and not reads_base and bool(output.any()):
                possible_terms.append(run)
        possible_terms.sort(key=_depth_and_start)
        candidates: list[ModuleRun] = []
        tensors = [total, base]
        for run in possible_terms:
            tensor = self._as_stream(run.output, total)
            if not any(torch.equal(tensor, earlier) for earlier in tensors):
                candidates.append(run)
                tensors.append(tensor)
        return sorted(candidates[:MOST_CANDIDATES], key=lambda run: run.end)

    def _place_of(self, stream: Tensor) -> ModuleTensor | None:
        """The input or output of a module that is a residual stream between sublayers; None if there is none."""
        allowed = rounding(self.arithmetic.dtype) * float(stream.norm())
        for incoming in (True, False):
            for run in sorted(self.inner_runs, key=_depth_and_start):
                tensor = run.input if incoming else run.output
                if tensor is None or tensor.shape != stream.shape or not tensor.is_floating_point():
                    continue
                if float((tensor.double() - stream).norm()) <= allowed:
                    return ModuleTensor(self._path_in_block(run), incoming)
        return None

    def _source_run(self, run: ModuleRun) -> ModuleRun:
        """The run that computes what norms, dropouts and scales behind it pass on."""
        while is_norm(run.module) or _has_no_matrix(run.module):
            earlier_runs = [earlier for earlier in self.inner_runs if earlier.end < run.start]
            input_sources = [earlier for earlier in earlier_runs if _equal(earlier.output, run.input)]
            if not input_sources:
                return run
            # The outermost of them.
            run = min(input_sources, key=lambda source: source.path.count("."))
        return run

    def _place_of_norms(self, terms: Sequence[ModuleRun]) -> Literal["before", "after", "both", "none"]:
        """Where normalisation sits in a block whose output is no norm's.

        Args:
            terms: the runs whose outputs are added to the stream.
        """
        norms_after = any(is_norm(run.module) for run in terms)
        norms_before = any(self._reads_norm(self._source_run(run)) for run in terms)
        if norms_before and norms_after:
            return "both"
        if norms_before:
            return "before"
        return "after" if norms_after else "none"

    def _reads_norm(self, run: ModuleRun) -> bool:
        """Whether a module reads the output of a norm in the block."""
        return any(_equal(run.input, norm.output) for norm in self._norms())

    def _family_names(self, terms: list[ModuleRun]) -> list[str]:
        """Names of sublayers in TransformerLens; "" for those of which a block has several."""
        sources = [self._source_run(run) for run in terms]
        kinds: list[Kind] = []
        for source in sources:
            other_sublayers = [run for run in sources if run is not source]
            kinds.append(self._kind(source, other_sublayers))
        names: list[str] = []
        for kind in kinds:
            same_family = [sublayer for sublayer in kinds if sublayer.family == kind.family]
            # Of several modules without mixing of positions, the only one that is called an MLP.
            is_only_named = kind.is_named and sum(sublayer.is_named for sublayer in same_family) == 1
            names.append(kind.family if len(same_family) == 1 or is_only_named else "")
        return names

    def _kind(self, run: ModuleRun, other_sublayers: list[ModuleRun]) -> Kind:
        """The kind of sublayer: by its name, or else by whether it mixes positions."""
        nested_runs: list[ModuleRun] = [run]
        while (outer := nested_runs[-1].parent) is not None and outer is not self.block:
            # A module that contains another sublayer is not part of this one.
            if any(sublayer.is_inside(outer) for sublayer in other_sublayers):
                break
            nested_runs.append(outer)
        names = [self._path_in_block(nested).rpartition(".")[2] for nested in nested_runs]
        class_names = [type(nested.module).__name__ for nested in nested_runs]
        text = " ".join([*names, *class_names]).lower()
        # Classes of a model such as Lfm2Moe have the name of a mixture of experts, whatever they compute.
        is_mixture = any("moe" in name or "expert" in name for name in names)
        # The name of the module itself says more than the names around it: `post_attention_ff` is an MLP.
        is_called_mlp = bool(MLP_WORDS.intersection(names[0].lower().split("_")))
        is_mlp = is_mixture or is_called_mlp or any(word in text for word in ("mlp", "feedforward", "feed_forward", "ffn"))
        # Before the test of positions: with keys of an earlier block, no position depends on what enters this one at others.
        if not is_called_mlp and ("attn" in text or "attention" in text):
            crosses = any(word in text for word in ("cross", "encoder_", "encdec"))
            return Kind("cross_attn_out" if crosses else "attn_out", True)
        if is_mlp:
            return Kind("mlp_out", True)
        is_by_position = all(_is_by_position(nested) for nested in nested_runs)
        return Kind("mlp_out" if is_by_position else "mixer_out", False)


@dataclass(frozen=True)
class Kind:
    """The family of a sublayer, and whether the names of its modules say so."""

    family: str
    is_named: bool


def _depth_and_start(run: ModuleRun) -> tuple[int, int]:
    """A key that sorts outer modules before inner ones, and modules of one depth as they run."""
    return run.path.count("."), run.start


def _best_multiples(outputs: Tensor, missing: Tensor, choices: Tensor) -> list[tuple[list[int], list[float]]]:
    """The choices of outputs whose multiples come nearest to a vector, with the fitted multipliers.

    Args:
        outputs: `candidate entry`.
        missing: `entry`.
        choices: `choice term`, indices of candidates.
    """
    # Least squares by the normal equations, for all choices at once.
    gram = outputs @ outputs.T
    projections = outputs @ missing
    gram_of_choice = gram[choices[:, :, None], choices[:, None, :]]
    fitted = (torch.linalg.pinv(gram_of_choice, hermitian=True) @ projections[choices][..., None])[..., 0]
    errors = missing @ missing - (fitted * projections[choices]).sum(-1)
    # Gram matrices round, so several of the best are tried in full.
    best = errors.argsort()[:3]
    return list(zip(choices[best].tolist(), fitted[best].tolist(), strict=True))


def _best_scales(outputs: Tensor, total: Tensor, base: Tensor, choices: Tensor) -> list[tuple[list[int], float]]:
    """The choices of outputs whose sum with a base comes nearest to a multiple of a total, with the factor of the sum."""
    sums = base + outputs[choices].sum(1)
    squared_norms = (sums * sums).sum(-1).clamp(min=1e-30)
    factors = (sums @ total) / squared_norms
    errors = total @ total - factors * (sums @ total)
    best = errors.argsort()[:3]
    return list(zip(choices[best].tolist(), factors[best].tolist(), strict=True))


def _has_no_matrix(module: torch.nn.Module) -> bool:
    """Whether a module has no parts and no matrix, like a dropout or a scale."""
    return not list(module.children()) and all(weight.dim() < 2 for weight in module.parameters())


def _is_by_position(run: ModuleRun) -> bool:
    """Whether a module computes each position from that position alone.

    It runs again with another vector at the first position: the outputs at the others must not change.
    """
    hidden = run.input
    if hidden is None or hidden.dim() < 2 or hidden.shape[-2] < 2:
        return False
    changed = hidden.clone()
    changed[..., 0, :] = hidden[..., 0, :].flip(-1)
    module = without_hooks(run.module)
    try:
        output = _output_on(module, run, hidden)
        changed_output = _output_on(module, run, changed)
    # Modules of any library fail in any way when they run outside of their model.
    except Exception:
        return False
    if output is None or changed_output is None or output.shape != changed_output.shape or output.dim() < 2:
        return False
    return torch.allclose(output[..., 1:, :], changed_output[..., 1:, :], rtol=1e-4, atol=1e-6)


def _output_on(module: torch.nn.Module, run: ModuleRun, tensor: Tensor) -> Tensor | None:
    """The output of a module on the arguments of a run, with another tensor in place of the first one."""
    for number, value in enumerate(run.args):
        if isinstance(value, Tensor):
            args = (*run.args[:number], tensor, *run.args[number + 1 :])
            return _first_tensor(module(*args, **run.kwargs))
    for name, value in run.kwargs.items():
        if isinstance(value, Tensor):
            return _first_tensor(module(*run.args, **{**run.kwargs, name: tensor}))
    return _first_tensor(module(*run.args, **run.kwargs))


def _block_sums(addition: Addition, sublayers: Sequence[Sublayer]) -> list[BlockSum]:
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
