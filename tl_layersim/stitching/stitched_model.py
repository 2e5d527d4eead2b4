"""Stitched models as modules, and access to their activations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures.blocks import entering, refuse_paths, with_blocks
from ..architectures.hook_points import HookPoint
from ..architectures.unembed import rounding
from ..core.arguments import typed
from ..core.errors import LayersimError
from ..data.batches import Batches
from ..data.data import Data
from ..data.input_names import MASK, TOKEN_IDS
from ..data.right_padding import POSITION_IDS, RightPadding
from ..sources.hooked_module import HookedSource
from ..sources.hooks import eval_mode
from ..sources.identity import hooks_on
from ..sources.partial_forward import LocalSplitModel, logits_of
from .adapters import Adapter

# Inputs that belong to the cache of the back model.
NOT_DATA = ("cache_position",)
# Arguments that switch the cache of keys and values on.
CACHE_SWITCHES = ("use_cache", "use_past_kv_cache")


class StitchedModel(nn.Module):
    """Lower blocks of a front model, an adapter, and upper blocks of a back model, as one model.

    The model takes the inputs of both models and returns the back's outputs. Masks, positions, final norm and head are the
    back's. `analyze` measures it from the stitch point on: its layer 0 is the output of the adapter. Neither model is copied or
    changed; gradients reach the adapter's input as in any module.

    `stitch(...).model` is one. Its `config` is the back's, and its `tokenizer` that of the stitch's data, None if the data was
    token ids.
    """

    def __init__(
        self, front: LocalSplitModel, back: LocalSplitModel, at: tuple[int, int], tokenizer: Any, adapter: Adapter
    ) -> None:
        super().__init__()
        # In this order, which is that of the parameters.
        self.front = front.module
        self.adapter = adapter.to(back.device)
        self.back = back.module
        self.at = at
        self.tokenizer = tokenizer
        self._split_models = (front, back)
        self.config: Any = getattr(self.back, "config", None)
        self.main_input_name = back.model.main_input
        self.reading_front = False
        self._takes_left_padding = False
        # This runs the back model once.
        back.tuples()

    def open_source(self, layers: list[str] | None, unembed: list[str] | None) -> StitchedSource:
        """Open this model so that `analyze` can read its activations."""
        return StitchedSource(self, layers, unembed)

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """Run the front blocks, the adapter and the back blocks. `options` go to the back model, whose output is returned."""
        args = () if input_ids is None else (input_ids,)
        # An argument that is None is left out: models without it do not take it.
        mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        _, back = self._split_models
        with self._joined():
            return self.back(*args, **mask, **self._without_cache(options), **back.source.anatomy.without_cache)

    @typed
    def generate(self, prompt: str | Tensor, **options: Any) -> Any:
        """Continue a prompt with the back model's own `generate`.

        Args:
            prompt: a text, tokenised as `analyze` does, or token ids `batch pos`.
            **options: options of the back's `generate`, such as `max_new_tokens`. Nothing is cached: every step runs the whole
                rows.

        Returns:
            Token ids with the prompt; for a text a text, or a list of texts if several are sampled.

        Examples:
            >>> import tl_layersim as lsim
            >>> model = lsim.demo_model()
            >>> same = lsim.stitch(model, model, lsim.demo_text()[:4], at=(2, 2), adapter="identity")
            >>> same.model.generate("Once upon a", max_new_tokens=4, do_sample=False)
            'Once upon a time, there was'
        """
        ids = self._token_ids(prompt) if isinstance(prompt, str) else prompt
        cache_switch = "use_cache"
        _, back = self._split_models
        if back.source.anatomy.library == "transformer_lens":
            cache_switch = "use_past_kv_cache"
            options = {"verbose": False, "return_type": "tokens"} | options
        generate: Any = self.back.generate
        with torch.no_grad(), self._joined():
            generated = generate(ids.to(back.device), **self._without_cache(options), **{cache_switch: False})
        if not isinstance(prompt, str):
            return generated
        texts: list[str] = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        return texts[0] if len(texts) == 1 else texts

    def _token_ids(self, prompt: str) -> Tensor:
        _, back = self._split_models
        description = replace(back.model, tokenizer=self.tokenizer)
        [batch] = Batches(Data(prompt, batch_size=1, seq_len=description.context), description, argument="prompt")
        return batch.tokens

    @staticmethod
    def _without_cache(options: dict[str, Any]) -> dict[str, Any]:
        """Remove `use_cache` and `use_past_kv_cache` from the options.

        Raises:
            LayersimError: the options use a key-value cache.
        """
        cache_options = [name for name in CACHE_SWITCHES if options.get(name)]
        cache_options += [name for name in ("past_key_values", "past_kv_cache") if options.get(name) is not None]
        if cache_options:
            raise LayersimError(f"`{cache_options[0]}` is not supported, because a stitched model has no key-value cache.")
        return {name: value for name, value in options.items() if name not in CACHE_SWITCHES}

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Replace the back model's `forward`, so that its upper blocks start from the adapter's output."""
        front, back = self._split_models
        # None if the back model has the `forward` of its class.
        instance_forward = vars(self.back).get("forward")
        back_forward: Callable[..., Any] = self.back.forward
        names = list(inspect.signature(back_forward).parameters)

        def restore_forward() -> None:
            if instance_forward is None:
                vars(self.back).pop("forward", None)
            else:
                vars(self.back)["forward"] = instance_forward

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            inputs = dict(zip(names, args, strict=False)) | kwargs
            x = self.adapter(self._read_front(front, inputs))
            with back.entered(self.at[1], lambda _: x):
                return back_forward(*args, **kwargs)

        # Generation reads from the signature which arguments it may pass, such as positions.
        @functools.wraps(back_forward)
        def through_front(*args: Any, **kwargs: Any) -> Any:
            # The front may be the same model.
            restore_forward()
            try:
                inputs = dict(zip(names, args, strict=False)) | kwargs
                order = _padding_of(inputs)
                if order.moves:
                    kwargs = kwargs | self._positions(inputs, names)
                    self._refuse_changed_logits(order, inputs | kwargs, run)
                return run(args, kwargs)
            finally:
                vars(self.back)["forward"] = through_front

        try:
            # Not a hook: TransformerLens and some generation loops call `forward` past hooks.
            vars(self.back)["forward"] = through_front
            yield
        finally:
            restore_forward()

    def _positions(self, inputs: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
        """Position ids that count from the first token of each row, for a back model that takes them and got none."""
        if POSITION_IDS not in names or inputs.get(POSITION_IDS) is not None:
            return {}
        return {POSITION_IDS: (inputs[MASK].long().cumsum(1) - 1).clamp(min=0)}

    def _refuse_changed_logits(self, order: RightPadding, inputs: dict[str, Any], run: Callable[..., Any]) -> None:
        """Raise an error if padding on the left changes the logits. The comparison is made once.

        Args:
            order: the rows with their padding on the right.
            inputs: the inputs of the back model by name, with padding on the left.
            run: runs the stitched model.

        Raises:
            LayersimError: the logits differ from those with padding on the right.
        """
        if self._takes_left_padding:
            return
        # Generation asks for the logits of the last position alone.
        inputs = {name: value for name, value in inputs.items() if "label" not in name and "logits_to_keep" not in name}
        # Probes would take these forward passes for those of the caller.
        self.reading_front = True
        try:
            with torch.no_grad(), eval_mode(self):
                left_padded = logits_of(run((), inputs))
                right_padded = order.restored(logits_of(run((), order.moved_inputs(inputs))))
        finally:
            self.reading_front = False
        if left_padded.dim() == 3:
            attended = inputs[MASK].bool().to(left_padded.device)
            left_padded = left_padded[attended]
            right_padded = right_padded[attended]
        difference = left_padded.double() - right_padded.double()
        gap = float(difference.norm() / right_padded.double().norm().clamp(min=1e-30))
        if not gap <= rounding(left_padded.dtype):
            names = f"{type(self.front).__name__} stitched to {type(self.back).__name__}"
            raise LayersimError(
                f"`attention_mask` has padding on the left, which changes the logits of {names} by {gap:.2g} of their norm. "
                "Pad rows on the right."
            )
        self._takes_left_padding = True

    def _read_front(self, front: LocalSplitModel, inputs: dict[str, Any]) -> Tensor:
        """The front's residual at the stitch point, for the inputs of the back model."""
        main_name = self._main_input_of_front(front, inputs)
        parameters = inspect.signature(type(self.front).forward).parameters
        takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        options = {}
        for name, value in inputs.items():
            if name == main_name or not isinstance(value, Tensor) or name in NOT_DATA or "label" in name:
                continue
            if name in parameters or name in front.model.inputs or (takes_any_name and name == "attention_mask"):
                options[name] = value.to(front.device)
            elif name not in ("attention_mask", "position_ids") and bool(value.any()):
                raise LayersimError(f"`{name}` is not an input of the front model, {front.model.name}.")
        main_input = inputs[main_name].to(front.device)
        switches = front.source.anatomy.without_cache
        _, back = self._split_models
        was_reading_front = self.reading_front
        try:
            self.reading_front = True
            residual = front.read(self.at[0], lambda: self.front(main_input, **options, **switches))
            # The adapter is on the device of the back model.
            return residual.to(back.device)
        finally:
            self.reading_front = was_reading_front

    def _main_input_of_front(self, front: LocalSplitModel, inputs: dict[str, Any]) -> str:
        """Name of the front's main input among `inputs`; without it, of the first tensor that is not floating point.

        Raises:
            LayersimError: there is none.
        """
        if isinstance(inputs.get(front.model.main_input), Tensor):
            return front.model.main_input
        # The back model may name its token ids differently.
        for name, value in inputs.items():
            if isinstance(value, Tensor) and not value.is_floating_point():
                return name
        needed = "token ids" if front.model.main_input == TOKEN_IDS else f"`{front.model.main_input}`"
        names = [name for name, value in inputs.items() if value is not None and value is not False]
        raise LayersimError(f"A stitched model needs {needed}; the inputs are {', '.join(names) or 'nothing'}.")


def _padding_of(inputs: dict[str, Any]) -> RightPadding:
    """Where the padding is in the inputs of a forward pass by name."""
    mask = inputs.get(MASK)
    if isinstance(mask, Tensor) and mask.dim() == 2 and inputs.get("past_key_values") is None:
        return RightPadding(mask.bool())
    return RightPadding(None)


class StitchedSource(HookedSource):
    """Activations of a stitched model, from the adapter's output to the last block."""

    def aside(self) -> bool:
        # The front's forward pass is not recorded, because front and back may share blocks.
        return bool(self.module.reading_front)

    def _open(self, layers: list[str] | None, unembed: list[str] | None) -> None:
        stitched = self.module
        assert isinstance(stitched, StitchedModel)
        refuse_paths(layers, unembed, "a stitched model")
        front, back = stitched._split_models
        # Number of the back's first block above the stitch point.
        first_block = stitched.at[1]
        self.blocks = back.blocks[first_block:]
        if not self.blocks:
            raise LayersimError(
                f"The stitch point is after {back.model.layers[-1]}, the last block, so no block is left to measure."
            )
        paths_by_id = {id(module): path for path, module in stitched.named_modules()}
        paths = [paths_by_id[id(block)] for block in self.blocks]
        self.anatomy = with_blocks(stitched, self.anatomy, paths, named=False)
        changes = [front.model.changes, back.model.changes, hooks_on(stitched)]
        self._model = replace(
            back.model,
            name=f"{front.model.name} up to {front.model.layers[stitched.at[0]]}, {stitched.adapter.kind}, {back.model.name}",
            config_hash=f"{front.model.config_hash}+{back.model.config_hash}",
            weights=f"{front.model.weights_hash}+{stitched.adapter.digest()}+{back.model.weights_hash}",
            # Front and back may be one model, with the same changes.
            changes="; ".join(dict.fromkeys(filter(None, changes))),
            source=f"stitched {front.model.source} and {back.model.source}",
            layers=(entering(back.model.layers[first_block + 1]), *back.model.layers[first_block + 1 :]),
            tokenizer=stitched.tokenizer,
            head=None if back.model.head is None else back.model.head.under("back"),
            **front.model.inputs_with(back.model),
        )

    def hook_points(self, at: Any, per_head: bool) -> tuple[HookPoint, ...]:
        raise LayersimError(f"`at` is {at!r}; only the residual stream of a stitched model can be read.")
