"""Recorded calls of transformer blocks, which can run again with another residual, in float32, or for single tokens.

This file is shipped to NDIF servers by value, as source: it uses torch and the standard library alone, and decorators are lost.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from ..core.errors import LayersimError

# Arguments for a cache of keys and values: of most Hugging Face blocks; of GPT-NeoX, GPT-J, Bloom, Falcon; of older blocks.
CACHES = ("past_key_values", "layer_past", "past_key_value")
# Arguments with positions on their second axis; the positions of the chosen tokens are taken.
BY_POSITION = ("position_embeddings", "position_ids")
Block = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class BlockCall:
    """A recorded call of a block in a forward pass.

    `again(call, hidden)` repeats the call with another residual.

    Attributes:
        block: the module, or its nnsight envoy.
        args: the positional arguments.
        kwargs: the keyword arguments.
        key: the argument that is the residual: an index of `args` or a name in `kwargs`.
        output: `batch pos d_model`, the residual after the block.
        graph: `output` with its autograd graph, whose leaf is `hidden`. It serves blocks that cannot be replayed, because edits
            of the model apply only in the forward pass. None for other blocks.
    """

    block: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: int | str
    output: Tensor
    graph: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """The residual before the block (`batch pos d_model`)."""
        residual: Tensor = self.args[self.key] if isinstance(self.key, int) else self.kwargs[self.key]
        return residual


def first_tensor(output: Any) -> Tensor:
    """The residual in a block's input or output. It is the tensor itself, or the first tensor of a tuple, list or mapping."""
    if isinstance(output, Tensor):
        return output
    values: Any = ()
    if isinstance(output, Mapping):
        values = output.values()
    elif isinstance(output, list | tuple):
        values = output
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise ValueError(f"The input or output of a block is a {type(output).__name__}; it must be or contain a tensor.")


def as_positions(hidden: Tensor) -> Tensor:
    """Add an axis of one position to a residual without one (`batch d_model` to `batch 1 d_model`). Others are unchanged."""
    return hidden[:, None] if hidden.dim() == 2 else hidden


class VectorBlock:
    """Wrapper that adds an axis of one position to the residuals of a block (`batch d_model` to `batch 1 d_model`).

    Args:
        block: the module, or its nnsight envoy.
        key: the argument that is the residual, see `BlockCall`.
    """

    def __init__(self, block: Any, key: int | str) -> None:
        self._module = getattr(block, "_module", block)
        self.block = block
        self.key = key

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        places = _places(args, kwargs)
        places[self.key] = places[self.key][:, 0]
        positional, named = _split(places)
        return first_tensor(self.block(*positional, **named))[:, None]


def _places(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    places: dict[int | str, Any] = dict(enumerate(args))
    places.update(kwargs)
    return places


def _split(places: Mapping[int | str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split arguments by index or name into positional and keyword arguments."""
    named = {name: value for name, value in places.items() if isinstance(name, str)}
    return tuple(places[number] for number in range(len(places) - len(named))), named


def _residual_key(places: Mapping[int | str, Any]) -> int | str:
    """Index or name of the residual, the first tensor among the arguments."""
    return next(place for place, value in places.items() if isinstance(value, Tensor))


def with_own_residual(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block, with a copy of the residual, to which the block may add in place, and without a cache.

    A cache is filled by the block, and filled once more when it is called again.
    """
    places = _places(args, kwargs)
    key = _residual_key(places)
    without_caches = {name: None if name in CACHES else value for name, value in places.items()}
    return _split({**without_caches, key: places[key].clone()})


def with_leaf(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of a block, with the residual as a leaf of the autograd graph.

    Returns:
        The arguments to record and the arguments to run the block on, each as a tuple and a dict. The block runs on a copy of
        the leaf, which edits may change in place.
    """
    places = _places(args, kwargs)
    key = _residual_key(places)
    before = places[key]
    leaf = as_positions(before).detach().requires_grad_()
    return _split({**places, key: leaf}), _split({**places, key: leaf.clone().reshape(before.shape)})


def gradients(on: bool) -> ExitStack:
    """Context manager that turns autograd on or off. If on, attention has second and batched derivatives."""
    stack = ExitStack()
    stack.enter_context(torch.set_grad_enabled(on))
    if on:
        stack.enter_context(plain_attention())
    return stack


def plain_attention() -> Any:
    """Context manager in which attention is computed by matmuls and a softmax.

    Only this form has second and batched derivatives.
    """
    return attention.sdpa_kernel([attention.SDPBackend.MATH])


def record_call(
    block: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, differentiated: bool = False
) -> BlockCall:
    """Record a call of a block. The residual is the first tensor among the arguments.

    Args:
        block: the module, or its nnsight envoy.
        args: the positional arguments.
        kwargs: the keyword arguments.
        output: output of the block.
        differentiated: whether the arguments come from `with_leaf`, and the autograd graph of the output is kept.

    Raises:
        LayersimError: the residual is a feature map.
    """
    places = _places(args, kwargs)
    key = _residual_key(places)
    if differentiated:
        # The output is copied, because an edit of the next block's input may change it in place.
        graph = as_positions(first_tensor(output).clone())
        return BlockCall(block, args, kwargs, key, graph.detach(), graph)
    # A copy, because the next block may add to it in place.
    after = first_tensor(output).detach().clone()
    if places[key].dim() > 3:
        raise LayersimError(
            f"The block {type(block).__name__} cannot be replayed: its input has shape "
            f"{' x '.join(map(str, places[key].shape))}, but must be batch x pos x width."
        )
    if places[key].dim() == 2:
        places[key] = as_positions(places[key])
        block = VectorBlock(block, key)
    return BlockCall(block, *_split(places), key, as_positions(after))


def again(call: BlockCall, hidden: Tensor, kwargs: Mapping[str, Any] | None = None) -> Tensor:
    """Replay a block call with another residual, and return the residual after the block.

    Floating-point arguments are converted to the dtype of the residual.

    Args:
        call: the block with its own arguments.
        hidden: `batch pos d_model`, the residual before the block.
        kwargs: all arguments but the residual, by name; None to use the recorded ones.
    """
    places = _places(call.args, call.kwargs) if kwargs is None else _places((), kwargs)
    # A copy, because some blocks add to their input in place.
    args, named = in_dtype(_split({**places, call.key: hidden.clone()}), hidden.dtype)
    # A model on several devices moves the input of a block to the device of its weights, and leaves the output on it.
    return first_tensor(call.block(*args, **named)).to(hidden.device)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor inside a value to a dtype.

    Inference tensors are cloned, because autograd cannot keep them.
    """
    if isinstance(value, Tensor):
        value = value.clone() if value.is_inference() else value
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(in_dtype(item, dtype) for item in value)
    if type(value) is dict:
        return {name: in_dtype(item, dtype) for name, item in value.items()}
    return value


def copied(value: Any, batch: int, times: int) -> Any:
    """Repeat the arguments of a block `times` times along the batch.

    Only tensors with one row for each row of the batch are repeated.
    """
    if isinstance(value, Tensor):
        # With one row, a first axis of length 1 need not belong to the batch, and broadcasts.
        has_batch_axis = batch > 1 and value.dim() > 1 and value.shape[0] == batch
        return value.repeat(times, *([1] * (value.dim() - 1))) if has_batch_axis else value
    if type(value) in (list, tuple):
        return type(value)(copied(item, batch, times) for item in value)
    if type(value) is dict:
        return {name: copied(item, batch, times) for name, item in value.items()}
    return value


class Widened:
    """Context manager in which the weights of a block have another dtype.

    The modules hold converted copies inside the context. The weights themselves are unchanged, so their gradients, hooks and
    optimisers are not affected. Weights on the meta device and integer weights are not converted. Weights that accelerate has
    offloaded are loaded once and stay in memory until the end.
    """

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        module = getattr(block, "_module", block)
        self.dtype = dtype
        # The dict of a module, the name in it and the weight that is replaced.
        self.replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        self.modules: list[Any] = list(module.modules()) if isinstance(module, torch.nn.Module) else []
        self.loaded: list[tuple[Any, Any]] = []

    def _load(self) -> None:
        """Load offloaded weights and disable accelerate's hooks, which would load them again."""
        for module in self.modules:
            if "_hf_hook" in vars(module) and any(p.is_meta for p in module._parameters.values() if p is not None):
                self.loaded.append((module, vars(module)["forward"]))
                module._hf_hook.pre_forward(module)
                module.forward = module._old_forward

    def __enter__(self) -> None:
        converted: dict[int, Tensor] = {}
        try:
            self._load()
            for module in self.modules:
                for tensors in (module._parameters, module._buffers):
                    for name, weight in tensors.items():
                        if weight is None or weight.is_meta or not weight.is_floating_point():
                            continue
                        if weight.dtype != self.dtype:
                            self.replaced.append((tensors, name, weight))
            for tensors, name, weight in self.replaced:
                # A weight that several modules share is converted once.
                if id(weight) not in converted:
                    copy = weight.detach().to(self.dtype)
                    converted[id(weight)] = torch.nn.Parameter(copy, False) if isinstance(weight, torch.nn.Parameter) else copy
                tensors[name] = converted[id(weight)]
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_error: Any) -> None:
        for tensors, name, weight in self.replaced:
            tensors[name] = weight
        for module, forward in self.loaded:
            vars(module)["forward"] = forward
            module._hf_hook.post_forward(module, None)
        self.replaced = []
        self.loaded = []


class RecordingCache:
    """Stand-in for a key-value cache that records the keys and values of a block."""

    def __init__(self) -> None:
        self.updates: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.updates.append((key, value))
        return key, value

    def get_seq_length(self, *_args: Any, **_kwargs: Any) -> int:
        return 0


class FixedCache(RecordingCache):
    """Stand-in for a key-value cache with fixed keys and values of all tokens. A block call adds its own.

    Args:
        key: `sample head pos d_head`.
        value: `sample head pos d_head`.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value

    def update(self, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)


def has_hooks(block: Any) -> bool:
    """Whether the user has registered hooks on a block. Such hooks may not work on single tokens."""
    module = getattr(block, "_module", block)
    if not isinstance(module, torch.nn.Module):
        return False
    # Hooks of these libraries are not the user's.
    libraries = ("nnsight", "accelerate", "transformer_lens.model_bridge")
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            for hook in hooks.values():
                if not str(getattr(hook, "__module__", "")).startswith(libraries):
                    return True
    return False


def by_name(call: BlockCall) -> dict[str, Any]:
    """All arguments of a call except the residual, by name.

    Raises:
        ValueError: the block's signature does not name an argument.
    """
    if not call.args:
        return {name: value for name, value in call.kwargs.items() if name != call.key}
    module = getattr(call.block, "_module", call.block)
    # Blocks of a TransformerBridge take any arguments, and pass them to the block that they wrap.
    owner = type(getattr(module, "original_component", module))
    parameters = inspect.signature(owner.forward).parameters.values()
    # Without `self`.
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    if call.key != 0 or len(call.args) > len(names):
        raise ValueError("the block takes arguments that its signature does not name")
    return dict(zip(names[1:], call.args[1:], strict=False)) | dict(call.kwargs)


class FewTokens:
    """Replay of a block on single tokens, with the keys and values of all other tokens fixed.

    Tokens influence each other only through attention, so this replay has the derivatives of the block, at the cost of one
    token. The copies of a token form one row; each copy attends to the other tokens and to itself, but to no other copy. If
    another token is read, copies of that token follow, and each attends to its own copy of the varied token.

    Args:
        call: the block with its own arguments.
        dtype: dtype of the computation.
        row: `sample`, the row of the batch that holds each sample.
        t_in: `sample`, the token that is varied.
        t_out: `sample`, the token that is read: equal to `t_in` for all samples, or different for all.

    Attributes:
        x: `sample d_model`, the unchanged residuals of the tokens `t_in`.
        x_out: `sample d_model`, the residuals of the tokens `t_out`, before the block.
        output: `batch pos d_model`, the block's output for the batch.

    Raises:
        ValueError: the block cannot run on single tokens: it takes no key-value cache, uses the cache more than once, or takes
            unknown arguments with positions.
    """

    def __init__(self, call: BlockCall, dtype: torch.dtype, row: Tensor, t_in: Tensor, t_out: Tensor) -> None:
        if has_hooks(call.block):
            raise ValueError("the block has hooks")
        named = by_name(call)
        caches = [name for name in CACHES if name in named]
        if not caches:
            raise ValueError("the block takes no key-value cache")
        self.call = call
        self.row = row
        self.cache = caches[0]
        self.named = named
        self.hidden = call.hidden.to(dtype)
        self.pos = self.hidden.shape[1]
        self.same_token = bool((t_in == t_out).all())
        # The tokens that run through the block, each in several copies.
        self.positions = t_in[:, None] if self.same_token else torch.stack([t_in, t_out], 1)
        self.x = self.hidden[row, t_in]
        self.x_out = self.hidden[row, t_out]
        recorded = RecordingCache()
        self.output = again(call, self.hidden, named | {self.cache: recorded})
        if len(recorded.updates) != 1 or any(x.dim() != 4 or x.shape[2] != self.pos for x in recorded.updates[0]):
            raise ValueError("the block must update its key-value cache once, with tensors `batch head pos d_head`")
        key, value = recorded.updates[0]
        self.key = self._rows(key)
        self.value = self._rows(value)
        self.mask = self._mask(named.get("attention_mask"))

    def _rows(self, value: Tensor) -> Tensor:
        """Select the row of each sample from a tensor (`batch ...`). A single row, shared by all samples, is expanded."""
        if value.shape[0] == len(self.hidden):
            return value.index_select(0, self.row.to(value.device))
        return value.expand(len(self.row), *value.shape[1:])

    def _mask(self, attention_mask: Any) -> Tensor:
        """The attention mask of the tokens, with keys at `pos` (`sample head token pos`): bools or numbers to add."""
        pos = self.pos
        positions = self.positions
        if attention_mask is None:
            later = torch.arange(pos, device=positions.device) > positions[:, :, None]
            zeros = torch.zeros(later.shape, dtype=self.hidden.dtype, device=positions.device)
            return zeros.masked_fill(later, self._never())[:, None]
        is_tensor = isinstance(attention_mask, Tensor)
        if not is_tensor or attention_mask.dim() != 4 or attention_mask.shape[2:] != (pos, pos):
            raise ValueError("`attention_mask` must be a tensor `batch head pos pos`")
        mask: Tensor = in_dtype(self._rows(attention_mask), self.hidden.dtype).to(positions.device)
        return mask.gather(2, positions[:, None, :, None].expand(-1, mask.shape[1], -1, pos))

    def _never(self) -> float:
        """Number that an additive mask holds where a token must not attend."""
        return torch.finfo(self.hidden.dtype).min

    def _mask_of(self, n: int) -> Tensor:
        """Attention mask in which n copies of each token are queries, and the row and the copies are keys.

        Its shape is `sample head (token copy) (pos + token copy)`.
        """
        never = False if self.mask.dtype == torch.bool else self._never()
        first = self.positions[:, None, None, :1].expand(-1, *self.mask.shape[1:3], 1)
        # The entry for the first token moves from the column of that token to the column of its own copy.
        own_entry = self.mask.gather(3, first)
        row_keys = self.mask.scatter(3, first, never)
        tokens = self.mask.shape[2]
        copies = torch.eye(n, dtype=torch.bool, device=row_keys.device)
        first_token_keys = torch.where(copies[:, None, :], own_entry[:, :, :, None, None, :], never)
        later_token_keys = torch.full_like(first_token_keys, never).expand(-1, -1, -1, -1, tokens - 1, -1)
        copy_keys = torch.cat([first_token_keys, later_token_keys], -2).flatten(-2)
        return torch.cat([row_keys[:, :, :, None].expand(-1, -1, -1, n, -1), copy_keys], -1).flatten(2, 3)

    def block(self, n: int) -> Block:
        """Function that replays the block on n residuals per sample.

        It maps residuals at `t_in` to outputs at `t_out`, both `sample n d_model`.
        """
        positions = self.positions.repeat_interleave(n, 1)
        arguments: dict[str, Any] = {"attention_mask": self._mask_of(n)}
        for name, value in self.named.items():
            parts = value if type(value) in (list, tuple) else (value,)
            if name in BY_POSITION and all(isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == self.pos for x in parts):
                at_tokens = []
                for x in parts:
                    rows = self._rows(x)
                    index = positions.reshape(*positions.shape, *([1] * (rows.dim() - 2)))
                    index = index.expand(-1, -1, *rows.shape[2:])
                    at_tokens.append(rows.gather(1, index.to(rows.device)))
                arguments[name] = type(value)(at_tokens) if type(value) in (list, tuple) else at_tokens[0]
            elif name != "attention_mask":
                if any(isinstance(x, Tensor) and self.pos in x.shape for x in parts):
                    raise ValueError(f"`{name}` depends on the position, but cannot be cut to single tokens")
                arguments[name] = value
        arguments[self.cache] = FixedCache(self.key, self.value)

        def call(x: Tensor) -> Tensor:
            if self.same_token:
                return again(self.call, x, arguments)
            read_tokens = self.x_out[:, None].expand(-1, n, -1)
            return again(self.call, torch.cat([x, read_tokens], 1), arguments)[:, n:]

        return call


def whole_block(call: BlockCall, dtype: torch.dtype, row: Tensor, t_in: Tensor, t_out: Tensor, copies: int = 1) -> Block:
    """Function that runs a block again on whole rows, with the residual of one position per sample replaced.

    It maps residuals at `t_in` to the block's outputs at `t_out`.

    Args:
        call: the block with its own arguments.
        dtype: dtype of the computation.
        row: `sample`, the row of the batch that holds each sample; all different.
        t_in: `sample`, the position that is varied.
        t_out: `sample`, the position that is read.
        copies: number of copies of the batch; the function takes and returns `(copies sample) d_model`.

    Returns:
        A function from `sample d_model` to `sample d_model`.
    """
    batch = len(call.hidden)
    hidden = call.hidden.to(dtype).repeat(copies, 1, 1)
    places = copied(_places(call.args, call.kwargs), batch, copies)
    args, kwargs = _split({**places, call.key: hidden})
    call_on_copies = BlockCall(call.block, args, kwargs, call.key, call.output)
    rows = (row + batch * torch.arange(copies, device=row.device)[:, None]).reshape(-1)
    t_in = t_in.repeat(copies)
    t_out = t_out.repeat(copies)

    def block(x: Tensor) -> Tensor:
        return again(call_on_copies, hidden.index_put((rows, t_in), x))[rows, t_out]

    return block
