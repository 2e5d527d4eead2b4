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

from ..architectures.blocks import entering, refuse_paths
from ..architectures.hook_points import HookPoint
from ..architectures.output_heads import no_cache
from ..architectures.transformer_lens import is_transformer_lens
from ..architectures.unembed import rounding
from ..core.arguments import typed
from ..core.errors import LayersimError
from ..data.batches import Batches
from ..data.data import Data
from ..data.non_token_inputs import MASK, TOKEN_IDS
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
        self.front, self.adapter, self.back = front.module, adapter.to(back.device), back.module
        self.at, self.tokenizer = at, tokenizer
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
        mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        args = () if input_ids is None else (input_ids,)
        with self._joined():
            return self.back(*args, **mask, **self._without_cache(options), **no_cache(self.back))

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
        ids = self._ids(prompt) if isinstance(prompt, str) else prompt
        cache = "use_past_kv_cache" if is_transformer_lens(self.back) else "use_cache"
        if cache == "use_past_kv_cache":
            options = {"verbose": False, "return_type": "tokens"} | options
        generate: Any = self.back.generate
        with torch.no_grad(), self._joined():
            out = generate(ids.to(self._split_models[1].device), **self._without_cache(options), **{cache: False})
        if not isinstance(prompt, str):
            return out
        texts: list[str] = self.tokenizer.batch_decode(out, skip_special_tokens=True)
        return texts[0] if len(texts) == 1 else texts

    def _ids(self, prompt: str) -> Tensor:
        described = replace(self._split_models[1].model, tokenizer=self.tokenizer)
        [batch] = Batches(Data(prompt, batch_size=1, seq_len=described.context), described, argument="prompt")
        return batch.tokens

    @staticmethod
    def _without_cache(options: dict[str, Any]) -> dict[str, Any]:
        """Remove `use_cache` and `use_past_kv_cache` from the options.

        Raises:
            LayersimError: the options use a key-value cache.
        """
        given = [key for key in CACHE_SWITCHES if options.get(key)]
        given += [key for key in ("past_key_values", "past_kv_cache") if options.get(key) is not None]
        if given:
            raise LayersimError(f"`{given[0]}` is not supported, because a stitched model has no key-value cache.")
        return {name: value for name, value in options.items() if name not in CACHE_SWITCHES}

    @contextmanager
    def _joined(self) -> Iterator[None]:
        """Replace the back model's `forward`, so that its upper blocks start from the adapter's output."""
        front, back = self._split_models
        own = vars(self.back).get("forward")
        call: Callable[..., Any] = self.back.forward
        names = list(inspect.signature(call).parameters)

        def plain() -> None:
            if own is None:
                vars(self.back).pop("forward", None)
            else:
                vars(self.back)["forward"] = own

        # Generation reads from the signature which arguments it may pass, such as positions.
        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = self.adapter(self._read_front(front, dict(zip(names, args, strict=False)) | kwargs))
            with back.entered(self.at[1], lambda _: x):
                return call(*args, **kwargs)

        @functools.wraps(call)
        def through_front(*args: Any, **kwargs: Any) -> Any:
            # The front may be the same model.
            plain()
            try:
                given = dict(zip(names, args, strict=False)) | kwargs
                order = _padding_of(given)
                if order.moves:
                    kwargs = kwargs | self._positions(given, names)
                    self._refuse_moved(order, given | kwargs, run)
                return run(args, kwargs)
            finally:
                vars(self.back)["forward"] = through_front

        try:
            # Not a hook: TransformerLens and some generation loops call `forward` past hooks.
            vars(self.back)["forward"] = through_front
            yield
        finally:
            plain()

    def _positions(self, given: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
        """Position ids that count from the first token of each row, for a back model that takes them and got none."""
        if POSITION_IDS not in names or given.get(POSITION_IDS) is not None:
            return {}
        return {POSITION_IDS: (given[MASK].long().cumsum(1) - 1).clamp(min=0)}

    def _refuse_moved(self, order: RightPadding, given: dict[str, Any], run: Callable[..., Any]) -> None:
        """Raise an error if padding on the left changes the logits. The comparison is made once.

        Args:
            order: the rows with their padding on the right.
            given: the inputs of the back model by name, with padding on the left.
            run: runs the stitched model.

        Raises:
            LayersimError: the logits differ from those with padding on the right.
        """
        if self._takes_left_padding:
            return
        # Generation asks for the logits of the last position alone.
        inputs = {name: value for name, value in given.items() if "label" not in name and "logits_to_keep" not in name}
        # Probes would take these forward passes for those of the caller.
        self.reading_front = True
        try:
            with torch.no_grad(), eval_mode(self):
                left = logits_of(run((), inputs))
                right = order.restored(logits_of(run((), order.moved_inputs(inputs))))
        finally:
            self.reading_front = False
        if left.dim() == 3:
            kept = given[MASK].bool().to(left.device)
            left, right = left[kept], right[kept]
        gap = float((left.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))
        if not gap <= rounding(left.dtype):
            names = f"{type(self.front).__name__} stitched to {type(self.back).__name__}"
            raise LayersimError(
                f"`attention_mask` has padding on the left, which changes the logits of {names} by {gap:.2g} of their norm. "
                "Pad rows on the right."
            )
        self._takes_left_padding = True

    def _read_front(self, front: LocalSplitModel, given: dict[str, Any]) -> Tensor:
        """The front's residual at the stitch point, for the inputs of the back model."""
        accepted = inspect.signature(type(self.front).forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        main = next(
            (name for name, value in given.items() if isinstance(value, Tensor) and not value.is_floating_point()), None
        )
        if isinstance(given.get(front.model.main_input), Tensor):
            main = front.model.main_input
        if main is None:
            needed = "token ids" if front.model.main_input == TOKEN_IDS else f"`{front.model.main_input}`"
            has = ", ".join(name for name, value in given.items() if value is not None and value is not False) or "nothing"
            raise LayersimError(f"A stitched model needs {needed}; the inputs are {has}.")
        passed = {}
        for name, value in given.items():
            if name == main or not isinstance(value, Tensor) or name in NOT_DATA or "label" in name:
                continue
            if name in accepted or name in front.model.inputs or (takes_any and name == "attention_mask"):
                passed[name] = value.to(front.device)
            elif name not in ("attention_mask", "position_ids") and bool(value.any()):
                raise LayersimError(f"`{name}` is not an input of the front model, {front.model.name}.")
        args, options = (given[main].to(front.device),), no_cache(self.front)
        outer = self.reading_front
        try:
            self.reading_front = True
            # The adapter is on the device of the back model.
            return front.read(self.at[0], lambda: self.front(*args, **passed, **options)).to(self._split_models[1].device)
        finally:
            self.reading_front = outer


def _padding_of(given: dict[str, Any]) -> RightPadding:
    """Where the padding is in the inputs of a forward pass by name."""
    mask = given.get(MASK)
    whole_rows = isinstance(mask, Tensor) and mask.dim() == 2 and given.get("past_key_values") is None
    return RightPadding(mask.bool() if whole_rows and mask is not None else None)


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
        above = stitched.at[1]
        self.blocks = back.blocks[above:]
        if not self.blocks:
            raise LayersimError(
                f"The stitch point is after {back.model.layers[-1]}, the last block, so no block is left to measure."
            )
        path_of = {id(module): path for path, module in stitched.named_modules()}
        self.paths, self._named = [path_of[id(block)] for block in self.blocks], False
        self.embed = None
        self._model = replace(
            back.model,
            name=f"{front.model.name} up to {front.model.layers[stitched.at[0]]}, {stitched.adapter.kind}, {back.model.name}",
            config_hash=f"{front.model.config_hash}+{back.model.config_hash}",
            weights=f"{front.model.weights_hash}+{stitched.adapter.digest()}+{back.model.weights_hash}",
            changes="; ".join(dict.fromkeys(filter(None, (front.model.changes, back.model.changes, hooks_on(stitched))))),
            source=f"stitched {front.model.source} and {back.model.source}",
            layers=(entering(back.model.layers[above + 1]), *back.model.layers[above + 1 :]),
            tokenizer=stitched.tokenizer,
            head=None if back.model.head is None else back.model.head.under("back"),
            **front.model.inputs_with(back.model),
        )

    def hook_points(self, at: Any, per_head: bool) -> tuple[HookPoint, ...]:
        raise LayersimError(f"`at` is {at!r}; only the residual stream of a stitched model can be read.")
