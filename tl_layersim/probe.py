"""attach: the same sums from inside a user's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .analyzer import Analyzer
from .checkpoint import Tally
from .data import new_digest
from .errors import LayersimError
from .guards import refuse_not_finite, refuse_other_logits
from .outcome import make_report
from .passes import add_sums
from .prepare import choose_analyzers
from .results import Report
from .rows import refuse_bare_padding
from .source import Kernel, View, reduce
from .sources import open_source
from .sources.hooked import Call, Choice, HookedSource
from .sums import Sums
from .typed import typed

BUFFERED_TOKENS = 2048


class Probe:
    """Sums what passes through a model while it is attached.

    Attributes:
        mask: `batch pos`, which positions of the coming forward passes count; None for those of the model's attention mask,
            or all. It holds until it is replaced; single-position steps of cached generation always count.
    """

    def __init__(self, source: HookedSource, analyzers: dict[str, Analyzer]) -> None:
        self.mask: Tensor | None = None
        self._source, self._analyzers = source, analyzers
        kernels = {name: analyzer.kernel(Sums()) for name, analyzer in analyzers.items()}
        # What asks the head is asked at once: in training, a later look would find other weights.
        self._at_once = {name: kernel for name, kernel in kernels.items() if analyzers[name].needs_unembed}
        self._later = {name: kernel for name, kernel in kernels.items() if name not in self._at_once}
        self._checked = not self._at_once
        self._sums = {name: Sums() for name in analyzers}
        self._waiting: list[View] = []
        self._forwards, self._sequences, self._tokens, self._digest = 0, 0, 0, new_digest()
        self._trouble: LayersimError | None = None

    def results(self) -> Report:
        """What was summed so far; can be asked for at any time, also after the block.

        Raises:
            LayersimError: nothing was seen, too little for an analyzer, or activations were not finite.
        """
        if self._forwards == 0:
            raise LayersimError(
                "There is nothing to measure: no forward pass went through the model while it was attached.",
                given="0 forward passes",
                expected="at least one inside the with block",
                do="with lsim.attach(model, ...) as probe: model(tokens)",
            )
        if self._trouble is None and not self._checked:
            raise LayersimError(
                "The head never ran, so the lens could not be checked against the model's own logits.",
                given=f"{self._forwards} forward passes of the blocks alone",
                expected="at least one forward pass up to the logits",
                do="run the whole model once inside the with block, or lsim.analyze(model, data, analyzers)",
            )
        # What waits is reduced for this report and stays waiting: asking must not change how minibatches fall.
        sums = self._with_waiting()
        if self._trouble:
            raise self._trouble
        tally = Tally({}, self._forwards, self._sequences, self._tokens, self._digest.hexdigest())
        return make_report(self._analyzers, [self._source.model], tally, sums, {}, {"attached": True})

    def _compare(self, gap: Tensor, computed: torch.dtype) -> None:
        """Of the first forward pass that comes to the head: the lens beside the model's own logits."""
        self._checked = True
        try:
            refuse_other_logits(gap, self._source.model, computed)
        except LayersimError as error:
            self._trouble = self._trouble or error

    def _choose(self, call: Call) -> Choice:
        batch, pos = call.shape
        counted = self._counted(call)
        attention = call.attention
        if isinstance(attention, Tensor) and attention.dim() == 2 and attention.shape[0] == batch and attention.shape[1] >= pos:
            return Choice(counted, attention[:, -pos:].bool().cpu())
        return Choice(counted, counted.cpu())

    def _counted(self, call: Call) -> Tensor:
        batch, pos = call.shape
        mask = self.mask
        if mask is not None and tuple(mask.shape) != call.shape and not (pos == 1 and mask.shape[0] == batch):
            raise LayersimError(
                "probe.mask does not fit this forward pass.",
                given=f"a mask of shape {tuple(mask.shape)}",
                expected=f"{call.shape}: batch x pos of the tokens that the model is given",
                do="set probe.mask before each forward pass, or probe.mask = None to count all",
            )
        if pos == 1 and any(analyzer.whole_rows for analyzer in self._analyzers.values()):
            self._trouble = self._trouble or LayersimError(
                "An analyzer whose samples are whole rows was attached to single steps.",
                given="a forward pass of one position, as in cached generation",
                expected="whole rows of tokens",
                do='model(tokens) on the finished rows, or CKA(level="token")',
            )
        if mask is not None and tuple(mask.shape) == call.shape:
            return mask.bool()
        if call.texts > 1 and mask is None:
            raise LayersimError(
                "The model pads texts of different lengths by itself, and the probe cannot see where.",
                given=f"{call.texts} texts",
                expected="tokens, with a mask if they are padded",
                do="tokens = model.to_tokens(texts); probe.mask = ...; model(tokens)",
            )
        attention = call.attention
        if pos == 1:
            return torch.ones(call.shape, dtype=torch.bool)
        if attention is None:
            if call.tokens is not None and tuple(call.tokens.shape) == call.shape:
                refuse_bare_padding(call.tokens, self._source.model.tokenizer)
            return torch.ones(call.shape, dtype=torch.bool)
        if not isinstance(attention, Tensor) or attention.dim() != 2 or attention.shape[0] != batch or attention.shape[1] < pos:
            raise LayersimError(
                "The probe cannot read from this attention mask which positions are padding.",
                given=f"attention_mask of shape {tuple(getattr(attention, 'shape', ()))}",
                expected=f"{call.shape}: batch x pos",
                do="set probe.mask before the forward pass; probe.mask = torch.ones(batch, pos) counts all",
            )
        # With a cache the attention mask also covers what was read before.
        return attention[:, -pos:].bool()

    def _see(self, view: View) -> None:
        self._forwards += 1
        count = view.tokens.numel()
        if count == 0:
            return
        self._tokens += count
        self._sequences += torch.unique_consecutive(view.sequence).numel()
        self._digest.update(view.tokens.cpu().numpy().tobytes())
        if self._at_once:
            self._sums = self._reduced(self._at_once, view)
        if not self._later:
            return
        # Cached generation gives one position at a time: gathered, they make minibatches and fewer kernel calls.
        self._waiting.append(view)
        if sum(v.tokens.numel() for v in self._waiting) >= BUFFERED_TOKENS:
            self._sums, self._waiting = self._with_waiting(), []

    def _with_waiting(self) -> dict[str, Sums]:
        if not self._waiting:
            return self._sums
        return self._reduced(self._later, _join(self._waiting))

    def _reduced(self, kernels: dict[str, Kernel], view: View) -> dict[str, Sums]:
        """The sums with one view more."""
        not_finite, out = reduce(kernels, view)
        try:
            refuse_not_finite(not_finite, [self._source.model.layers], f"forward pass {self._forwards} or shortly before")
        except LayersimError as error:
            # Raised with the results: activations that overflow must not end the loop that the probe watches.
            self._trouble = self._trouble or error
            return self._sums
        return self._sums | add_sums({name: self._sums[name] for name in kernels}, out)


def _join(views: list[View]) -> View:
    if len(views) == 1:
        return views[0]
    rows, offset = [], 0
    for view in views:
        rows.append(view.sequence + offset)
        offset += int(view.sequence.max()) + 1
    return View(
        residual=torch.cat([v.residual for v in views], dim=1),
        tokens=torch.cat([v.tokens for v in views]),
        sequence=torch.cat(rows),
        position=torch.cat([v.position for v in views]),
        next_token=torch.cat([v.next_token for v in views if v.next_token is not None]),
    )


@contextmanager
@typed
def attach(model: Any, analyzers: Any, *, layers: list[str] | None = None, unembed: list[str] | None = None) -> Iterator[Probe]:
    """Sum over whatever the model is run on inside the block: a user's own loop, a training step, `generate`.

    Outputs, gradients and state stay as they are, and every hook is gone at the end, also after an exception. Positions that
    the model's attention mask leaves out are not counted. Hooks that change the stream at the same hook points are seen if
    they were added before.

    Args:
        model: HookedTransformer, TransformerBridge or a Hugging Face model.
        analyzers: as in `analyze`; each token passes once, so those that need a first pass are refused.
        layers: paths of the blocks, for layouts that are not known.
        unembed: paths of the final norm and the head, for models where they are not found.

    Yields:
        A `Probe`; call its `results()`.

    Raises:
        LayersimError: the model cannot be hooked, or an analyzer needs a first pass.

    Example:
        >>> import tl_layersim as lsim, torch
        >>> model = lsim.demo_model()
        >>> with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        ...     _ = model(torch.arange(40).view(2, 20))
        >>> probe.results()["cosine"].provenance.tokens
        40
    """
    chosen = choose_analyzers(analyzers)
    source = open_source(model, layers=layers, unembed=unembed)
    if not isinstance(source, HookedSource):
        raise LayersimError(
            "Only a model whose modules run in this loop can be attached to.",
            given=type(model).__name__,
            expected="HookedTransformer, TransformerBridge or a Hugging Face model",
            do="lsim.analyze(model, data, analyzers)",
        )
    for analyzer in chosen.values():
        analyzer.check(source.model)
        if analyzer.label_source:
            raise LayersimError(
                f"{type(analyzer).__name__} takes its labels from the data, and a loop hands the model tokens alone.",
                given=f"labels={analyzer.options().get('labels')!r}",
                expected="labels='next_token'",
                do="lsim.analyze(model, data, analyzers)",
            )
        if analyzer.needs_unembed and source.model.head is not None and source.model.head.reads != "every":
            raise LayersimError(
                f"The head of {source.model.name} classifies whole rows, and a loop does not say where a row ends.",
                given=type(analyzer).__name__,
                expected="a head that says something at every position",
                do="lsim.analyze(model, data, analyzers)",
            )
        if analyzer.needs_calls:
            raise LayersimError(
                f"{type(analyzer).__name__} calls blocks again, which a loop of your own would see as further forward passes.",
                given=type(analyzer).__name__,
                expected="an analyzer that only reads",
                do="lsim.analyze(model, data, analyzers)",
            )
        if analyzer.first_kernel() is not None:
            raise LayersimError(
                f"{type(analyzer).__name__} needs a first pass over the data, and a loop passes once.",
                given=", ".join(f"{k}={v!r}" for k, v in analyzer.options().items()),
                expected="an analyzer of one pass",
                do=analyzer.one_pass,
            )
    probe = Probe(source, chosen)
    with source.tapped(probe._see, probe._choose, probe._compare if not probe._checked else None):
        yield probe
