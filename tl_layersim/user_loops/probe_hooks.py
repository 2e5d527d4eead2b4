"""Hooks that collect the activations of each complete forward pass in a user's loop.

Forward passes may be nested, fail half way, generate with a cache, or be run again by gradient checkpointing.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..activations.block_call import CACHES, first_tensor
from ..activations.view import SiteBuffer, View
from ..architectures.hook_points import multiplied, read_in_next_run, to_positions
from ..architectures.output_heads import lens_of
from ..architectures.transformer_lens import right_padding
from ..architectures.unembed import Unembed, rounding, tensor_of, unembed_gap
from ..core.errors import LayersimError, warn
from ..data.batches import next_tokens
from ..data.data import Notes
from ..data.labels import NO_LABEL
from ..data.padding_masks import mask_of, masked_warning
from ..data.positions import Positions
from ..sources.activation_checks import refuse_other_logits
from ..sources.hooked_module import HookedSource, whole_tensor
from ..sources.hooks import StopForward, is_unrecorded, on_enter, on_leave, temporary_hooks
from ..sources.source import SEVERAL_RUNS, not_once


class ProbeHook:
    """A forward hook or forward pre-hook, which a copy of the module lacks (`not_copied`).

    Args:
        call: the function that torch calls.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that accepts any arguments and returns None, so that a pickled model can be
        # loaded without this package. It stays in the copy of a class that copies itself in its own way.
        return getattr, (nullcontext(), "__exit__")


class Removal:
    """A value that `copy.deepcopy` and `pickle` replace by what `OrderedDict.pop` returns: an entry is removed in the copy.

    Args:
        entries: the dict; in a copy, its copy.
        key: key of the entry.
    """

    def __init__(self, entries: MutableMapping[int, Any], key: int) -> None:
        self.entries = entries
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        # All names are of the standard library, so that a pickled model can be loaded without this package.
        return OrderedDict.pop, (self.entries, self.key, None)


class CopiedAsFlag:
    """The flag of a hook that takes keyword arguments; in a copy of the module it is True, and the hook is removed.

    Args:
        removal: removes the hook from the copy.
        handle: torch's handle of the hook. While it is unpickled, torch reserves its id, so that no later hook gets the flag.
    """

    def __init__(self, removal: Removal, handle: RemovableHandle) -> None:
        self.removal = removal
        self.handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, ((self.removal, self.handle),)


def not_copied(module: torch.nn.Module, handle: RemovableHandle) -> RemovableHandle:
    """Have a hook removed from each copy of its module, however it is copied or pickled.

    A module is copied attribute by attribute, and torch keeps beside the hooks, in an attribute that comes later, which of them
    take keyword arguments. The entry of the hook there removes the hook from the copy.

    Args:
        module: the module.
        handle: handle of a hook that takes keyword arguments.
    """
    for hooks, flags in (
        (module._forward_hooks, module._forward_hooks_with_kwargs),
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    ):
        if handle.id in hooks:
            # Torch asks only whether there is an entry.
            removal = Removal(cast("OrderedDict[int, Any]", hooks), handle.id)
            flags[handle.id] = CopiedAsFlag(removal, handle)  # type: ignore[assignment]
    return handle


def uncompiled(hook: Callable[..., None], missed: Callable[[], None]) -> Callable[..., None]:
    """Wrap a hook so that `torch.compile` does not compile it.

    The hook runs between two compiled graphs. If a single graph is required, as by `fullgraph=True`, the hook does not run.

    Args:
        hook: the hook, with any arguments.
        missed: function that is called while `torch.compile` makes a graph that has no place for the hook.
    """
    # Its functions have no annotations.
    compiler: Any = torch.compiler
    run = compiler.disable(hook)

    # While a graph is made, torch calls a function of a constant result, and traces all others.
    def is_one_graph() -> bool:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        # torch has no public name for these. True where a later version has other names: no hook is then traced.
        translator = InstructionTranslator.current_tx()
        one_graph = bool(getattr(translator, "one_graph", True) or getattr(translator, "error_on_graph_break", False))
        if one_graph:
            missed()
        return one_graph

    is_skipped = compiler.assume_constant_result(is_one_graph)

    def call(*args: Any) -> None:
        if not (torch.compiler.is_compiling() and is_skipped()):
            run(*args)

    return call


CACHE_ARGUMENTS = (*CACHES, "past_kv_cache")
# Inputs that a stack inside a model may take in place of tokens.
OTHER_INPUTS = ("pixel_values", "input_features", "input_values")


@dataclass(frozen=True)
class Call:
    """Shape and inputs of one forward pass.

    Attributes:
        shape: `batch pos` of the activations in the blocks (one position per row in cached generation).
        tokens: `batch pos`; None if the model was called with embeddings.
        attention: attention mask of the stack that is read, in the form that the model was given; None if there is none.
        cached: whether the model was given cached keys and values of earlier positions, which the mask then covers too.
        start: token id with which the model itself begins its decoder input; None in any other stack.
    """

    shape: tuple[int, int]
    tokens: Tensor | None
    attention: Any
    cached: bool = False
    start: int | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the positions are tokens: the call has token ids or an attention mask."""
        return self.tokens is not None or self.attention is not None

    @cached_property
    def attended(self) -> Tensor | None:
        """Attention mask at the positions of this pass (bool `batch pos`); None if it is missing or has another form."""
        mask = self.attention
        batch, pos = self.shape
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != batch:
            return None
        # With a cache the attention mask also covers earlier positions.
        covers_earlier = self.cached and mask.shape[1] > pos
        if mask.shape[1] == pos or covers_earlier:
            return mask[:, -pos:].bool()
        return None


@dataclass(frozen=True)
class ForwardPassPositions:
    """Chooses the counted positions of each forward pass.

    Attributes:
        rule: the rule of the run for positions.
        source: the model. If there is no mask, tokens with its padding id raise an error.
        whole_rows: whether an analyzer needs whole rows, so that forward passes of a single position raise an error.
        notes: the notes, which count the rows without a mask.
    """

    rule: Positions
    source: HookedSource
    whole_rows: bool
    notes: Notes = field(default_factory=Notes)

    def choose(self, call: Call, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Masks of the counted and of the attended positions (each `batch pos`).

        Args:
            call: the forward pass.
            mask: the mask `probe.mask`.

        Raises:
            LayersimError: the positions are not known, or the rule does not apply to this forward pass.
        """
        batch, pos = call.shape
        fits = mask is not None and tuple(mask.shape) == call.shape
        # A mask of the prompt stays set while cached generation adds single positions to its rows.
        is_one_step = mask is not None and pos == 1 and mask.shape[0] == batch
        if mask is not None and not fits and not is_one_step:
            raise LayersimError(
                f"`probe.mask` has shape {tuple(mask.shape)}; it must have shape {call.shape}, the shape of the input tokens."
            )
        if pos == 1 and self.whole_rows:
            raise LayersimError(
                "The attached analyzer needs whole rows, but this forward pass has a single position, as in cached generation. "
                'Call model(tokens) on the finished rows, or use CKA(level="token").'
            )
        if mask is not None and fits:
            countable = mask
        elif pos == 1:
            countable = torch.ones(call.shape, dtype=torch.bool)
        else:
            countable = self._attended(call)
        attended = (countable if call.attended is None else call.attended).cpu()
        if self.rule.rule == "all":
            return countable, attended
        if call.tokens is None:
            self.rule.refuse_without_tokens()
            ids = torch.zeros(call.shape, dtype=torch.int64)
        else:
            ids = call.tokens.cpu().expand(call.shape)
        counted = self.rule.select_rows(ids, countable.cpu(), continues(call))
        return counted.to(countable.device), attended

    def _attended(self, call: Call) -> Tensor:
        """Positions that the model attends to; all positions if there is no mask."""
        attention = call.attention
        if attention is None:
            if call.tokens is not None and tuple(call.tokens.shape) == call.shape:
                pad = right_padding(self.source.module)
                tokens = call.tokens.cpu()
                if pad is not None and bool((tokens[:, -1] == pad).any()):
                    padding = (tokens == pad).flip(1).cumprod(1).flip(1).bool()
                    self.notes.masked += int(padding.any(1).sum())
                    self.notes.once(masked_warning([pad]))
                    return ~padding
                # A decoder's own start token is often the padding token too.
                begins_with_start = call.start is not None and bool((call.tokens[:, 0] == call.start).all())
                text = call.tokens[:, 1:] if begins_with_start else call.tokens
                self._refuse_padding(text, decoder=call.start is not None)
            return torch.ones(call.shape, dtype=torch.bool)
        if call.attended is None:
            raise LayersimError(
                f"`attention_mask` has shape {tuple(getattr(attention, 'shape', ()))}; it must have shape "
                f"{call.shape}, `batch pos`. Otherwise set `probe.mask` before the forward pass."
            )
        return call.attended

    def _refuse_padding(self, tokens: Tensor, decoder: bool) -> None:
        """Raise an error if rows start or end with padding, for calls without an attention mask."""
        self.notes.runs.add(tokens.cpu(), self.source.model)
        if mask_of(tokens.cpu(), self.source.model) is not None:
            raise LayersimError(
                "`attention_mask` is missing, but rows of tokens start or end with padding. Pass "
                f"`{'decoder_' if decoder else ''}attention_mask` to the model, or set `probe.mask`."
            )


def continues(call: Call) -> bool:
    """Whether a forward pass is a later step of cached generation.

    Args:
        call: the forward pass.
    """
    if isinstance(call.attention, Tensor) and call.attention.dim() == 2:
        # The first pass of a generation may be given an empty cache.
        return call.cached and call.attention.shape[1] > call.shape[1]
    return call.cached and call.shape[1] == 1


@dataclass
class ForwardPass:
    """Activations read so far in one forward pass.

    Attributes:
        call: its shape and inputs.
        attended: `batch pos`, positions that the model attends to.
        buffer: the activations at the counted positions.
        sites_read: the sites that were read, in order.
    """

    call: Call
    attended: Tensor
    buffer: SiteBuffer
    sites_read: list[int] = field(default_factory=list)


class Frame:
    """State of one running call of a module: the model, or an inner module that contains all blocks.

    The model has level 0. The root frame, of level -1, is for activations outside of any call.
    """

    def __init__(self, module: torch.nn.Module | None, level: int, parent: Frame | None) -> None:
        self.module = module
        self.level = level
        self.parent = parent
        # A call of the model inside a call of the same model is another forward pass; a stack inside it is not.
        self.inner = parent is not None and 0 <= parent.level < level
        self.tokens: Tensor | None = None
        self.attention: Any = None
        self.cached = False
        # Whether tokens and mask belong to the decoder.
        self.decoder = False
        # First row of the residual that left the last block, for the comparison with the logits.
        self.last_residual: Tensor | None = None
        # Number of sites that a pass had read when another pass began in the same call.
        self.superseded_count: int | None = None
        # Sites that were read in this call, also those of a pass that is complete.
        self.sites_of_call: set[int] = set()
        # Whether all sites were read in this call.
        self.complete = False
        self.forward_pass: ForwardPass | None = None
        # Number of runs so far of each module that is read, by its first site.
        self.runs: Counter[int] = Counter()
        # Whether this call belongs to a forward pass that is not measured, see `every` of `Recorder`.
        self.skipped: bool = self.inner and parent is not None and parent.skipped

    @property
    def outermost(self) -> Frame:
        """Frame of the outermost module call in the same forward pass."""
        frame = self
        while frame.inner and frame.parent is not None:
            frame = frame.parent
        return frame

    @property
    def sites_read(self) -> list[int]:
        """Sites read so far in the incomplete forward pass."""
        return [] if self.forward_pass is None else self.forward_pass.sites_read


def stack_side(source: HookedSource) -> str:
    """Name of the stack that the probe reads in an encoder-decoder.

    Returns:
        "encoder" or "decoder"; "" for a model of one stack, "both" if blocks of both or of none are read.
    """
    if source.anatomy.kind != "encoder-decoder":
        return ""
    return source.anatomy.stack or "both"


class Recorder:
    """Collects the activations of each complete forward pass.

    Sites out of order, or in a backward pass, are ignored.

    Args:
        source: the model.
        pooled: whether a sample is the mean of a row's counted positions.
        choose: returns the positions of a call that count, and those that the model attends to, each `batch pos`.
        on_view: receives the view of each complete forward pass, and its call.
        on_error: receives errors, which must not end the user's forward pass.
        compare: whether the lens is compared with the logits when the head runs for the first time; then False.
        every: 1 to read every forward pass, n to read the first of each n.
    """

    def __init__(
        self,
        source: HookedSource,
        pooled: bool,
        choose: Callable[[Call], tuple[Tensor, Tensor]],
        on_view: Callable[[View, Call], None],
        on_error: Callable[[Exception], None],
        compare: bool,
        every: int,
    ) -> None:
        self.source = source
        self.points = source.reading.points
        self.order = source.reading.order
        self.names = source.sites
        self.pooled = pooled
        self.choose = choose
        self.on_view = on_view
        self.on_error = on_error
        self.compare = compare
        self.every = every
        # Number of forward passes that began, measured or not.
        self.passes_begun = 0
        # TransformerLens's run_with_hooks and generate call the model's `forward` without its own hooks.
        self.direct = source.anatomy.library == "transformer_lens"
        # The sites of the residual stream lie inside the module that runs the blocks; others may lie anywhere.
        self.inside = source.reads_residual
        output = source.residual.points[-1].name
        self.output_site = next((site for site, point in enumerate(self.points) if point.name == output), None)
        self.side = stack_side(source)
        start = getattr(getattr(source.module, "config", None), "decoder_start_token_id", None)
        self.start = start if self.side == "decoder" and isinstance(start, int) else None
        # The residual of the row whose logits were compared, until the pass ends.
        self.compared_residual: Tensor | None = None
        self.thread = threading.get_ident()
        self.frame = Frame(None, -1, None)
        self.stopped = False
        # Whether the warning that a block did not run was issued.
        self.missed = False
        # The site that was read last by a pass that has not read all; None after a complete pass.
        self.last_read: int | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context manager that adds hooks to the model and removes them at the end."""
        source = self.source
        with temporary_hooks() as handles, temporary_hooks() as test_handles:

            def end_test() -> None:
                for handle in test_handles:
                    handle.remove()

            for module, incoming, receive in source.stream_test(end_test):
                test_handles.append(self._watch(module, incoming, receive))
            for level, module in enumerate(_stacks(source)):
                # These two know where a forward pass begins and ends, and run also in one that is not measured.
                handles.append(self._on_enter(module, partial(self._enter_module, level), in_skipped=True))
                # Also after an exception, so that a later call does not see the state of a failed one.
                handles.append(self._on_leave(module, self._leave_module, always=True, in_skipped=True))
            if source.anatomy.embedding is not None:
                handles.append(self._on_enter(source.anatomy.embedding, self._read_tokens))
            if self.direct:
                handles.append(self._on_enter(source.blocks[0], self._read_mask))
            for (module, incoming), sites in source.modules_read().items():
                handles.append(self._watch(module, incoming, partial(self._read_sites, sites)))
            if self.compare and source.model.head is not None:
                head = source.module.get_submodule(source.model.head.modules[-1])
                handles.append(self._on_leave(head, self._compare_logits))
            yield

    # ---- registration of hooks

    def _watch(self, module: torch.nn.Module, incoming: bool, receive: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a hook that reads the first tensor of a module's input or output."""
        if incoming:
            return self._on_enter(module, lambda _m, args, kwargs: receive(first_tensor((*args, *kwargs.values()))))
        return self._on_leave(module, lambda _m, _args, output: receive(first_tensor(output)))

    def _on_enter(self, module: torch.nn.Module, handle: Callable[..., None], in_skipped: bool = False) -> RemovableHandle:
        return not_copied(module, on_enter(module, self._hook(handle, in_skipped)))

    def _on_leave(
        self, module: torch.nn.Module, handle: Callable[..., None], always: bool = False, in_skipped: bool = False
    ) -> RemovableHandle:
        """Register a forward hook, a function of the module, its positional arguments and its output."""

        def with_kwargs(module: torch.nn.Module, args: tuple[Any, ...], _kwargs: dict[str, Any], output: Any) -> None:
            handle(module, args, output)

        return not_copied(module, on_leave(module, self._hook(with_kwargs, in_skipped), with_kwargs=True, always=always))

    def _hook(self, handle: Callable[..., None], in_skipped: bool) -> ProbeHook:
        """Wrap a hook so that its errors do not end the user's forward pass.

        Args:
            handle: the hook.
            in_skipped: whether the hook runs also in forward passes that are not measured.
        """

        def call(*args: Any) -> None:
            if self.frame.skipped and not in_skipped:
                return
            # Gradient checkpointing runs blocks again inside the backward pass; torch's own checkpointing uses the same test.
            if self.stopped or is_unrecorded() or torch._C._current_graph_task_id() != -1:
                return
            try:
                if threading.get_ident() != self.thread:
                    raise LayersimError(
                        "A forward pass ran in another thread than the `with` block of the probe, which measures one thread. "
                        "Enter lsim.attach(...) in the thread that runs the model."
                    )
                handle(*args)
            except StopForward:
                raise
            except Exception as error:
                self._stop(error)

        return ProbeHook(uncompiled(call, self._stop_in_one_graph))

    def _stop(self, error: Exception) -> None:
        """Report an error, and read no more activations."""
        if not self.stopped:
            self.stopped = True
            self.on_error(error)

    def _stop_in_one_graph(self) -> None:
        self._stop(
            LayersimError(
                "A compiled forward pass cannot be measured: one graph for the whole model leaves no place for hooks. "
                'Compile without fullgraph=True, or use torch.compiler.set_stance("force_eager").'
            )
        )

    # ---- calls of hooks

    def _enter_module(self, level: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parent = self.frame
        frame = self.frame = Frame(module, level, parent)
        if frame.skipped:
            return
        if frame.inner:
            frame.tokens = parent.tokens
            frame.attention = parent.attention
            frame.decoder = parent.decoder
            frame.cached = parent.cached
            # A stack that is called again on its own output runs its blocks again in the same forward pass.
            frame.sites_of_call = set(parent.sites_of_call)
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        inputs = dict(zip(names, args, strict=False)) | kwargs
        frame.cached |= any(inputs.get(name) is not None for name in CACHE_ARGUMENTS)
        if self.side == "decoder" and ("decoder_input_ids" in names or "decoder_input_ids" in inputs):
            # The modules around the decoder also take the encoder's tokens and mask, which do not belong to the decoder.
            if not frame.decoder:
                frame.tokens = None
                frame.attention = None
                frame.decoder = True
            tokens = inputs.get("decoder_input_ids")
            mask = inputs.get("decoder_attention_mask")
        else:
            first_input = inputs.get(names[0]) if names else None
            tokens = inputs.get("input_ids", first_input)
            mask = inputs.get("attention_mask")
            has_other_inputs = any(inputs.get(name) is not None for name in OTHER_INPUTS)
            if has_other_inputs and not _is_tokens(tokens):
                # A separate tower of a model that also reads text.
                frame.tokens = None
                frame.attention = None
                frame.sites_of_call = set()
        if _is_tokens(tokens):
            frame.tokens = tokens.detach()
            # Inputs of its own make a call of a stack a forward pass of its own.
            frame.sites_of_call = set()
        # The outer model takes the plain mask; the stack inside it may take a mask that is computed from it.
        is_plain = isinstance(mask, Tensor) and mask.dim() == 2
        if mask is not None and (frame.attention is None or is_plain):
            frame.attention = mask
        # A pass of a front model runs aside, and is none of the user's.
        if self.every > 1 and not frame.inner and not self.source.aside():
            values = frame.tokens if frame.tokens is not None else inputs.get("inputs_embeds")
            if isinstance(values, Tensor) and values.dim() > 1:
                self._refuse_step(Call((values.shape[0], values.shape[1]), frame.tokens, frame.attention, frame.cached))
            frame.skipped = self.passes_begun % self.every > 0
            self.passes_begun += 1

    def _refuse_step(self, call: Call) -> None:
        """Raise an error for a later step of cached generation, which belongs to the rows of an earlier forward pass."""
        if continues(call):
            raise LayersimError(
                f"`every` is {self.every}, but a forward pass continues rows from a cache, and steps of one generation belong "
                "together. Leave out `every`, or call model(tokens) on the finished rows."
            )

    def _leave_module(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        frame: Frame | None = self.frame
        while frame is not None and frame.module is not module:
            # A frame that an interrupt left behind.
            frame = frame.parent
        if frame is None or frame.parent is None:
            return
        if frame.inner:
            if frame.last_residual is not None:
                frame.parent.last_residual = frame.last_residual
            frame.parent.complete |= frame.complete
            if self.inside:
                frame.parent.sites_of_call |= frame.sites_of_call
        self.frame = frame.parent
        # A pass that failed, or that another run of this package ended early, has no output.
        if output is None or frame.level != 0 or frame.skipped or self.source.aside():
            return
        self._refuse_multiple(output)
        sites = range(len(self.points))
        if self.order is None and not self.inside:
            missing = next(site for site in sites if site not in frame.sites_read)
            raise self._not_once(missing, "the forward pass did not run it")
        if not frame.complete and not self.missed:
            self.missed = True
            sites_read = {*frame.sites_read, *frame.sites_of_call}
            missing = next(site for site in sites if site not in sites_read)
            # A filter of the user may make errors of warnings.
            with suppress(Warning):
                warn(
                    f"A forward pass is not measured, because the module of {self.names[missing]} did not run. If the "
                    "module was replaced, attach a new probe. If the model was compiled before, call "
                    'torch.compiler.set_stance("force_eager").'
                )

    def _read_tokens(self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_tensors = [value for value in (*args, *kwargs.values()) if _is_tokens(value)]
        # A user may embed tokens outside of any forward pass; an encoder-decoder embeds those of both stacks.
        if token_tensors and self._is_in_forward_pass(self.frame) and not self.side:
            self.frame.tokens = token_tensors[0].detach()

    def _read_mask(self, _module: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the attention mask from the arguments of block 0. Direct calls of `model.forward` run no hooks of the model."""
        mask = kwargs.get("attention_mask")
        frame = self.frame
        if frame.attention is None and isinstance(mask, Tensor) and mask.dim() == 2:
            frame.attention = mask
        frame.cached |= kwargs.get("past_kv_cache_entry") is not None

    def _compare_logits(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        """Compare the logit lens with the model's logits on the first row, when the head runs for the first time."""
        frame = self.frame
        residual = frame.last_residual
        frame.last_residual = None
        lens = self._lens() if self.compare and self._is_in_forward_pass(frame) else None
        if residual is None or lens is None:
            return
        self.compare = False
        logits = tensor_of(output)[0].detach()
        with torch.no_grad(), torch.autocast(device_type=residual.device.type, enabled=False):
            attended = torch.ones(len(residual), dtype=torch.bool)
            gap = unembed_gap(lens, residual, logits, attended, finished=False)
        refuse_other_logits(lambda: gap, self.source.model, logits.dtype)
        self.compared_residual = residual

    def _refuse_multiple(self, output: Any) -> None:
        """Raise an error if the model multiplies the output of its head by a factor that the lens does not know.

        A hook of the user may change the logits in any other way.

        Args:
            output: output of the model, for the row that was compared.
        """
        residual = self.compared_residual
        self.compared_residual = None
        logits = getattr(output, "logits", None)
        lens = self._lens()
        if residual is None or lens is None or lens.reads != "every":
            return
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            return
        count = min(8, logits.shape[1])
        with torch.no_grad(), torch.autocast(device_type=residual.device.type, enabled=False):
            lens_logits = lens(residual[-count:]).double().cpu()
        model_logits = logits[0, -count:].detach().double().cpu()
        if lens_logits.shape != model_logits.shape or not bool(lens_logits.any()):
            return
        # The factor of least squares.
        factor = float((lens_logits * model_logits).sum() / (lens_logits * lens_logits).sum())
        allowed = rounding(self.source.model.torch_dtype, logits.dtype)
        is_multiple = bool((model_logits - factor * lens_logits).norm() <= allowed * model_logits.norm())
        if is_multiple and abs(factor - 1) > allowed:
            raise LayersimError(
                f"The logits of {self.source.model.name} are {factor:.6g} times what its head {self.source.model.head} gives, "
                "which a probe does not know. Use lsim.analyze(model, data, analyzers), which finds the factor."
            )

    def _read_sites(self, sites: list[int], hidden: Tensor) -> None:
        """Store the input or output of a module as the activations of `sites`. Complete forward passes go to `on_view`."""
        innermost = self.frame
        if self.source.aside() or not self._is_in_forward_pass(innermost):
            return
        if self.every > 1 and innermost.level < 0:
            raise LayersimError(
                f"`every` is {self.every}, which counts calls of the model, and generate, run_with_hooks and run_with_cache of "
                "TransformerLens call its `forward`. Call model(tokens), or leave out `every`."
            )
        frame = innermost if self.inside else innermost.outermost
        for site in read_in_next_run(self.points, sites, frame.runs):
            if innermost.level >= 0 and site in innermost.sites_of_call:
                if not self.inside:
                    raise self._not_once(site, SEVERAL_RUNS)
                raise LayersimError(
                    f"{self.names[site]} (module {self.points[site].module}) is reached more than once in a forward pass of "
                    f"{self.source.model.name}, and each block must run exactly once. Inside hooks, call model(tokens), not "
                    "model.forward(...)."
                )
            if not self._expected(site, frame):
                return
            innermost.sites_of_call.add(site)
            tokens = innermost.tokens
            pos = tokens.shape[1] if tokens is not None and tokens.dim() == 2 else None
            point = self.points[site]
            name = self.names[site]
            places = to_positions(whole_tensor(hidden, name), point.channels, name, pos)
            if self.inside and places.dim() > 3:
                raise LayersimError(
                    f"{name} (module {point.module}) of {self.source.model.name} is {' x '.join(map(str, places.shape))}, and "
                    "a residual stream must be one tensor batch x pos x width."
                )
            frame.forward_pass = frame.forward_pass or self._start_pass(site, innermost, places)
            frame.forward_pass.buffer.put(site, multiplied(places, point.multiplier), point.part)
            frame.forward_pass.sites_read.append(site)
            self.last_read = site
            if site == self.output_site and self.compare:
                frame.last_residual = hidden[0].detach()
        forward_pass = frame.forward_pass
        if forward_pass is not None and len(forward_pass.sites_read) == len(self.points):
            self.order = tuple(forward_pass.sites_read)
            innermost.complete = frame.complete = True
            frame.forward_pass = None
            self.last_read = None
            if frame.level < 0:
                frame.tokens = None
                frame.attention = None
                frame.cached = False
            self.on_view(self._view(forward_pass), forward_pass.call)

    def _expected(self, site: int, frame: Frame) -> bool:
        """Whether `site` is next in the model's order of sites; True if the order is unknown.

        The first site in this order begins a new forward pass.
        """
        if self.order is None:
            # A site that was read in this pass begins another pass.
            if site in frame.sites_read:
                frame.forward_pass = None
            return True
        if site == self.order[0]:
            # Counted before the pass is dropped: the sites belong to it.
            frame.superseded_count = len(frame.sites_read) or None
            frame.forward_pass = None
            return True
        if frame.sites_read and site == self.order[len(frame.sites_read)]:
            return True
        if frame.superseded_count is not None and site == self.order[frame.superseded_count]:
            raise LayersimError(
                f"A second forward pass of the model began before the first reached {self.names[site]}. Inside hooks, call "
                "model(tokens), not model.forward(...)."
            )
        return False

    def _is_in_forward_pass(self, frame: Frame) -> bool:
        """Whether activations read in `frame` belong to a forward pass of the model."""
        return self.direct or frame.level >= 0

    def _start_pass(self, site: int, frame: Frame, hidden: Tensor) -> ForwardPass:
        """Begin to read a forward pass, and choose its counted positions."""
        shape = (hidden.shape[0], hidden.shape[1] if hidden.dim() > 2 else 1)
        tokens = frame.tokens
        if hidden.dim() == 2 and tokens is not None and tokens.dim() == 2 and tokens.numel() == shape[0]:
            # Some modules, such as the MLP of OPT, run on batch and positions as one axis.
            shape = (tokens.shape[0], tokens.shape[1])
        call = Call(shape, tokens, frame.attention, frame.cached, self.start)
        counted, attended = self.choose(call)
        if self.pooled and not call.has_tokens:
            # Each site of an image may have positions of its own, of which the mean is taken.
            shape = (counted.shape[0], counted.shape[1])
        if tuple(counted.shape) != shape:
            raise LayersimError(
                f"The activations at {self.names[site]} are {' x '.join(map(str, hidden.shape))}; they must be "
                f"{' x '.join(map(str, counted.shape))} x width, the shape of the input tokens."
            )
        samples = counted.reshape(-1).nonzero()[:, 0]
        buffer = SiteBuffer(self.names, samples, shape, self.pooled, call.has_tokens)
        return ForwardPass(call, attended, buffer)

    def _not_once(self, site: int, why: str) -> LayersimError:
        return not_once(self.names[site], self.points[site].module, why)

    def _lens(self) -> Unembed | None:
        """The logit lens with the current weights, which may change in a loop."""
        return lens_of(self.source.module, self.source.model.head)

    def _view(self, forward_pass: ForwardPass) -> View:
        buffer = forward_pass.buffer
        input_tokens = forward_pass.call.tokens
        shape = buffer.shape
        samples = buffer.samples.to(buffer.activations.device)
        tokens = torch.zeros(shape, dtype=torch.int64)
        following = torch.full(shape, NO_LABEL)
        if input_tokens is not None:
            rows_fit = input_tokens.dim() == 2 and input_tokens.shape[0] in (1, shape[0])
            if not rows_fit or input_tokens.shape[1] != shape[1]:
                raise LayersimError(
                    f"The input tokens have shape {tuple(input_tokens.shape)}, but the blocks receive {shape[0]} x {shape[1]} "
                    "positions. Call model(inputs_embeds=...), or name the blocks that read the tokens: "
                    "open_model(model, layers=[...])."
                )
            tokens = input_tokens.expand(shape)
            if not buffer.pooled:
                following = next_tokens(tokens, forward_pass.attended.to(tokens.device))
        token_fields = {
            "tokens": tokens.to(samples.device).reshape(-1)[samples],
            "next_token": following.to(samples.device).reshape(-1)[samples],
        }
        return buffer.view(token_fields, self._lens())


def _is_tokens(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not value.is_floating_point()


def _stacks(source: HookedSource) -> list[torch.nn.Module]:
    """Modules that contain all blocks, outermost first. A user may call any of them."""
    blocks = set(source.blocks)
    stacks = [source.module]
    # A TransformerBridge keeps the Hugging Face model that it wraps beside its own modules.
    for root in (source.module, vars(source.module).get("original_model")):
        if not isinstance(root, torch.nn.Module):
            continue
        for module in root.modules():
            if module not in blocks and blocks <= {*module.modules()}:
                stacks.append(module)
    return list(dict.fromkeys(stacks))
