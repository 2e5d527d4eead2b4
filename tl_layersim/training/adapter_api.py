"""Adapters that align a model whose weights cannot be changed: low-rank maps, trained through the model where it is."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..analysis.report_assembly import record
from ..analysis.validation import with_tokenizer
from ..core.errors import LayersimError, in_words, warn
from ..core.resumable import ResumableFile, Snapshot
from ..core.storage import refuse_unwritable
from ..core.tally import Tally
from ..core.typed import typed
from ..data.batches import Batch
from ..data.labels import NO_LABEL, warn_of_unused
from ..data.options import DataOptions
from ..models.layout import classes_with_head
from ..models.model_info import Model
from ..models.nnsight import NNsightSource
from ..models.source import refuse_inference_weights
from ..models.targets import usual_labels
from ..models.validation import lens_gap, need_stream, refuse_other_logits
from ..remote.adapter_training import Item, Parts, RemoteDescent
from ..remote.open import open_source
from ..remote.source import RemoteSource
from .adapters import AlignedAdapters
from .losses import Weights, answered, layer_weights
from .state import State, open_training_file, state_of, state_snapshot
from .training_data import TrainingData, found_in_feeds, has_images, open_feeds


@typed
def train_adapters(
    model: Any,
    data: Any,
    *,
    at: list[int | str] | None = None,
    rank: int = 8,
    steps: int = 200,
    lr: int | float = 3e-3,
    weights: Weights = "linear",
    seed: int = 0,
    eval_data: Any = None,
    labels: Any = None,
    layers: list[str] | None = None,
    unembed: list[str] | None = None,
    remote: bool | str = False,
    checkpoint: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    batch_size: int = 16,
    seq_len: int | None = None,
    pack: bool = False,
    max_tokens: int | None = None,
    skip_first: int = 0,
    prepend_bos: bool = True,
    column: str | None = None,
) -> AlignedAdapters:
    r"""Make the layers of a frozen nnsight model say early what it says at its end, by low-rank maps in its residual stream.

    What leaves block l is changed to $x^l = h + (h A_l^T) B_l^T$, which the blocks above read. A and B are trained with the
    aligned loss $\sum_l w_l \, CE(W \, \mathrm{norm}(x^l), y)$ over all layers, with the model's own final norm and head.
    Nothing else learns. On a server the steps are made there: tokens, A and B cross, and no activations.

    A starts as normal numbers of variance 1 / d_model and B as zeros, so that training starts from the model as it is. The
    change is a product with h, and AdamW's steps do not depend on the size of gradients: one learning rate is as good for a
    stream of any size. It falls linearly to 0.

    Args:
        model: an nnsight model.
        data: as in `analyze`.
        at: which blocks get an adapter, by number from 0 or by the name of what leaves them (`blocks.2.hook_resid_post`);
            default: all.
        rank: of each adapter.
        steps: of the optimiser, each on one batch.
        lr: the learning rate of the first step.
        weights: "linear", w_l = 2 l / (L (L + 1)); "uniform"; or one number for each layer, which must sum to 1.
        seed: of A and of the order of batches.
        eval_data: what layers are judged on. Default: the last tenth of the rows of `data`, which are then not trained on.
        labels: what layers ought to say: `"next_token"`, `"data"`, or a table, as in `LogitLens`. Default: `"next_token"`, for
            a classifier `"data"`.
        layers: see `analyze`.
        unembed: see `analyze`.
        remote: False to run here, "local" for nnsight's simulation of a server, True or an address for a server, which has to
            be a trusted one.
        checkpoint: a file that keeps a training that is interrupted; the same call goes on from it, with the same numbers.
        tokenizer: in place of the model's own.
        batch_size: see `analyze`, as for all further options.
        seq_len: see `analyze`.
        pack: see `analyze`.
        max_tokens: see `analyze`.
        skip_first: see `analyze`.
        prepend_bos: see `analyze`.
        column: see `analyze`.

    Returns:
        The adapters, with their learning curve and held-out losses by layer.

    Raises:
        LayersimError: the model is not run by nnsight, has no head that is known, or its server keeps its weights in a sandbox.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5; Hu et al. 2022 (arXiv 2106.09685) for low-rank maps.

    Example:
        >>> import nnsight, tl_layersim as lsim
        >>> demo = lsim.demo_model()
        >>> model = nnsight.TransformersModel(demo, task="text-generation", tokenizer=demo.tokenizer)
        >>> adapters = lsim.train_adapters(model, lsim.demo_text()[:8], at=[1, 3], rank=4, steps=2)
        >>> adapters.losses.shape
        torch.Size([2, 8])
    """
    refuse_unwritable(checkpoint, "checkpoint")
    for name, value in (("rank", rank), ("steps", steps)):
        if value < 1:
            raise LayersimError(f"{name} is too small.", given=f"{name}={value}", expected="1 or more", do=f"{name}=8")
    if not 0 < lr < math.inf:
        raise LayersimError("lr is out of range.", given=f"lr={lr}", expected="a number above 0", do="lr=1e-3")
    if not _is_nnsight(model):
        # Before it is opened: what is then missing is not the point.
        raise _not_nnsight(model)
    source = open_source(model, layers=layers, unembed=unembed, remote=remote)
    assert isinstance(source, NNsightSource)
    known = with_tokenizer(source.model, tokenizer)
    _refuse(known, rank)
    refuse_inference_weights(source.module)
    blocks = _blocks(known, at)
    shares = layer_weights(weights, len(known.layers) - 1)
    assert known.head is not None
    reading = DataOptions(batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column)
    if has_images(data):
        raise LayersimError(
            "Adapters are trained on tokens.",
            given="data with pixel_values",
            expected="texts or rows of tokens",
            do="finetune_aligned(model, data), which takes images, for a model that is loaded here",
        )
    usual = usual_labels(labels, [(known, source.module)])
    feeds = open_feeds(data, eval_data, labels, reading, known, source.module, usual)
    digests = {"trained_on": feeds[0].digest(), "judged_on": feeds[1].digest()}
    task = {"at": blocks, "rank": rank, "steps": steps, "lr": float(lr), "weights": shares}
    task |= {"layers": layers, "unembed": unembed}
    identity = {
        "model": [known.name, known.config_hash, known.weights_hash, known.dtype, known.source],
        "task": task | {"seed": seed, "batch_size": batch_size},
        "pad": known.tokenizer.pad_token_id if known.tokenizer is not None else None,
        "version": version("tl_layersim"),
        **digests,
    }
    saved = open_training_file(checkpoint, identity)
    work = _Work(RemoteDescent(source, blocks, shares), feeds, known.head.reads, steps, float(lr), batch_size, seed)
    begun = time.perf_counter()
    start = _start(known, len(blocks), rank, seed)
    held = saved.resume(lambda notes, tensors: _held(*state_of(notes, tensors), start, len(known.layers) - 1))
    _say_what_crosses(source, work, start)
    with work.descent.evaluating():
        row = _row(feeds[1])
        source.settle(row)
        need_stream(source.model, "Aligned training")
        refuse_other_logits(lens_gap(known, lambda: source.unembed_gap(row)), known)
        before = work.look(start)
        if not bool(before.isfinite().all()):
            raise LayersimError(
                f"The losses of {known.name} are not finite, before anything is trained.",
                given=f"{known.dtype} weights",
                expected="finite logits at every layer",
                do="load it in float32 or bfloat16",
            )
        learnt, curves = work.train(start, saved, held)
        after = work.look(learnt)
    options = (
        reading.record()
        | found_in_feeds(*feeds)
        | task
        | {"trained_on": digests["trained_on"], "train_rows": len(feeds[0])}
        | _record_of(source)
    )
    run = record([known], work.tally(time.perf_counter() - begun), options, seed)
    if not isinstance(usual, str):
        warn_of_unused(usual, run)
    found = AlignedAdapters(
        values=torch.stack([before, after]),
        curve=curves @ torch.tensor(shares, dtype=torch.float64),
        curves=curves,
        down=learnt["down"],
        up=learnt["up"],
        weights=tuple(shares),
        blocks=tuple(blocks),
        paths=tuple(source.paths[block] for block in blocks),
        layers=known.layers,
        provenance=run,
    )
    if not found.aligned("after") <= found.aligned("before"):
        warn(
            f"On held-out data the aligned loss rose from {found.aligned('before'):.4g} to {found.aligned('after'):.4g}. Take "
            f"more data, fewer steps, or lr={lr / 10:g}."
        )
    return found


class _Work:
    """Data and settings of a call: rows to train on, rows to judge by."""

    def __init__(
        self,
        descent: RemoteDescent,
        feeds: tuple[TrainingData, TrainingData],
        reads: str,
        steps: int,
        lr: float,
        rows: int,
        seed: int,
    ) -> None:
        self.descent, self.reads, self.rows = descent, reads, rows
        self.feed, self.judged = feeds
        self.steps, self.lr, self.seed = steps, lr, seed
        self._orders: dict[int, list[int]] = {}

    def item(self, feed: TrainingData, numbers: Sequence[int], step: int = 0, rate: float | None = None) -> Item:
        """What is sent of some rows."""
        piece = feed.take(numbers)
        index, wanted = answered(self.reads, piece.targets, piece.attended, piece.main.shape[1])
        return self.descent.item(piece.main, piece.options, index, wanted, step, rate)

    def step(self, number: int) -> Item:
        """A step, counted from 0: all rows in a new order each time round."""
        count = len(self.feed)
        places = range(number * self.rows, (number + 1) * self.rows)
        self._orders = {turn: self._order(turn) for turn in sorted({place // count for place in places})}
        numbers = [self._orders[place // count][place % count] for place in places]
        return self.item(self.feed, numbers, number + 1, self.lr * (self.steps - number) / self.steps)

    def _order(self, turn: int) -> list[int]:
        made = torch.Generator().manual_seed(self.seed * 1_000_003 + turn)
        return self._orders.get(turn) or torch.randperm(len(self.feed), generator=made).tolist()

    def look(self, parts: Parts) -> Tensor:
        """`layer`: held-out loss with adapters."""
        count = len(self.judged)
        looks = [range(start, min(start + self.rows, count)) for start in range(0, count, self.rows)]
        losses, asked = torch.zeros((), dtype=torch.float64), 0
        with tqdm(total=len(looks), desc="held out", unit="batch", disable=None, leave=False) as bar:
            run = self.descent.run(len(looks), lambda n: self.item(self.judged, looks[n]), parts, say=bar.set_postfix_str)
            for found, _ in run:
                for loss, number in found:
                    losses, asked = losses + loss, asked + number
                bar.update(len(found))
        return losses / asked

    def train(self, start: Parts, saved: ResumableFile, held: tuple[Parts, State, list[Tensor]] | None) -> tuple[Parts, Tensor]:
        """The adapters at the end, and `step layer` the losses on the way.

        Args:
            start: from where.
            saved: the file that keeps it.
            held: what it held before.
        """
        now = (start, State(), list[Tensor]())
        if held is not None:
            now = held
        shares = torch.tensor(self.descent.weights, dtype=torch.float64)

        def snapshot() -> Snapshot | None:
            parts, state, curves = now
            return state_snapshot(state, parts | {"curves": torch.stack(curves)}) if curves else None

        def save() -> None:
            if (found := snapshot()) is not None:
                saved.save(*found)

        bar = tqdm(total=self.steps, initial=now[1].step, desc="adapters", unit="step", disable=None)
        with saved.saved_on_interrupt(snapshot, lambda: "What was learnt"), bar:
            for found, after in self.descent.run(self.steps, self.step, now[0], now[1].step, bar.set_postfix_str):
                _, state, curves = now
                means = [loss / count for loss, count in found]
                self._refuse_not_finite(means, after, state.step + len(means))
                # At once, so that an interrupt finds all of it or nothing.
                now = (after, _further(state, means, shares), curves + means)
                if saved.due:
                    save()
                bar.update(len(means))
        save()
        return now[0], torch.stack(now[2])

    def _refuse_not_finite(self, losses: list[Tensor], parts: Parts, step: int) -> None:
        if not bool(torch.stack(losses).isfinite().all() and parts["up"].isfinite().all() and parts["down"].isfinite().all()):
            raise LayersimError(
                f"The training diverged: a loss or an adapter is not finite by step {step} of {self.steps}.",
                given=f"lr={self.lr:g}",
                expected="finite losses",
                do=f"lr={self.lr / 10:g}, with another checkpoint=",
            )

    def tally(self, seconds: float) -> Tally:
        """For the record: what was judged."""
        count = len(self.judged)
        asked = sum(int((self.judged.take([row]).targets != NO_LABEL).sum()) for row in range(count))
        return Tally({}, -(-count // self.rows), count, asked, self.judged.digest(), seconds)


def _row(feed: TrainingData) -> Batch:
    """The first row, without padding."""
    piece = feed.take([0])
    attended = torch.ones_like(piece.main, dtype=torch.bool) if piece.attended is None else piece.attended
    return Batch(piece.main, attended, attended, 0).first_row


def _held(state: State, tensors: Parts, start: Parts, layers: int) -> tuple[Parts, State, list[Tensor]]:
    """What a file holds of a training, if it is of the shapes that the training begins with."""
    parts = {name: tensors[name] for name in start}
    wrong = [name for name, part in parts.items() if part.shape != start[name].shape or part.dtype != start[name].dtype]
    if wrong or tensors["curves"].shape != (state.step, layers):
        raise ValueError(f"other shapes of {', '.join(wrong) or 'curves'}")
    return parts, state, list(tensors["curves"])


def _further(state: State, losses: list[Tensor], shares: Tensor) -> State:
    curve = [*state.curve, *(float(loss @ shares) for loss in losses)]
    return State(step=state.step + len(losses), curve=curve)


def _start(model: Model, count: int, rank: int, seed: int) -> Parts:
    """Adapters that change nothing yet, and the optimiser's moments."""
    assert model.d_model is not None
    made = torch.Generator().manual_seed(seed)
    wide = torch.float64 if model.dtype == "torch.float64" else torch.float32
    down = torch.randn(count, rank, model.d_model, generator=made, dtype=torch.float64) / math.sqrt(model.d_model)
    state = {"down": down.to(wide), "up": torch.zeros(count, model.d_model, rank, dtype=wide)}
    moments = ("mean", "square")
    return state | {f"{name} {moment}": torch.zeros_like(part) for name, part in state.items() for moment in moments}


def _is_nnsight(model: Any) -> bool:
    return isinstance(model, NNsightSource) or any(cls.__module__.split(".")[0] == "nnsight" for cls in type(model).__mro__)


def _not_nnsight(model: Any) -> LayersimError:
    from ..stitching.stitched_model import StitchedModel

    stitched = isinstance(model, StitchedModel)
    return LayersimError(
        "Adapters are trained inside traces of an nnsight model.",
        given=f"{'a stitched model' if stitched else type(model).__name__}",
        expected="a TransformersModel or NNsight(module)",
        do="train them on the nnsight model of its back"
        if stitched
        else "finetune_aligned(model, data), which trains a model that is loaded here; or nnsight.NNsight(model)",
    )


def _refuse(model: Model, rank: int) -> None:
    """Refuse, before any data is read, a model that adapters cannot be trained through."""
    need_stream(model, "Aligned training")
    if model.calls != "gradients":
        raise LayersimError(
            "Adapters are trained by gradients through the model, and this server runs requests in a sandbox that weights stay "
            "out of: training there would do nothing, without a word.",
            given=model.source,
            expected="a trusted server, or a model that runs here",
            do="ask its operator for a trusted key, or load the model here; adapters that are trained apply in a sandbox too",
        )
    if model.head is None:
        raise LayersimError(
            f"{model.name} has no head that is known, so its layers say nothing that could be right or wrong.",
            given=model.source,
            expected="a model with logits",
            do=f"load it by {classes_with_head(model.source)}; or unembed=['path.of.final_norm', 'path.of.head']",
        )
    if model.d_model is None:
        raise LayersimError(
            f"The width of {model.name} is not known.",
            given="a configuration without hidden_size",
            expected="model.config.hidden_size",
            do="model.config.hidden_size = the width of the residual stream, before nnsight wraps the model",
        )
    if rank > model.d_model:
        raise LayersimError(
            "rank is too large.", given=f"rank={rank}", expected=f"at most {model.d_model}, the model's width", do="rank=8"
        )
    if model.dtype == "torch.float16":
        raise LayersimError(
            "Gradients through a float16 model vanish: its smallest number is 6e-8.",
            given=f"{model.name} in float16",
            expected="float32, or bfloat16, which has float32's range",
            do="load it in bfloat16",
        )


def _blocks(model: Model, at: list[int | str] | None) -> list[int]:
    """Numbers of the blocks that get an adapter, in order."""
    count = len(model.layers) - 1
    if at is None:
        return list(range(count))
    names = {name: number for number, name in enumerate(model.layers[1:])}
    found = [names.get(block) if isinstance(block, str) else block for block in at]
    known = [number for number in found if number is not None and not isinstance(number, bool) and 0 <= number < count]
    if len(set(known)) < len(at) or not at:
        wrong = [block for block, number in zip(at, found, strict=True) if number not in known]
        raise LayersimError(
            "These are no blocks to put adapters at." if wrong else "Adapters need a list of different blocks.",
            given=f"{wrong[0]!r} in at={at}" if wrong else f"at={at}",
            expected=f"different numbers from 0 to {count - 1}, or names from {model.layers[1]} to {model.layers[-1]}",
            do=f"at=[{count // 2}], or at=None for all blocks",
        )
    return sorted(known)


def _say_what_crosses(source: NNsightSource, work: _Work, parts: Parts) -> None:
    """What will be asked of the line, before it is asked."""
    if not isinstance(source, RemoteSource):
        return
    size = sum(part.numel() * part.element_size() for part in parts.values())
    tqdm.write(
        f"{source.offer.server}: {work.steps:,} steps in at most as many requests, fewer where steps are fast. Each request "
        f"takes {in_words(size)} of adapters there and back, and each step its tokens. Before and after, {len(work.judged)} "
        "rows are judged. Activations and weights stay.",
        file=sys.stderr,
    )


def _record_of(source: NNsightSource) -> dict[str, Any]:
    return {"remote": [source.record()]} if isinstance(source, RemoteSource) else {}
