"""`StitchExperiment`: fits and evaluates the stitches of one call of `stitch` or `stitch_grid`."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.errors import LayersimError, in_words, warn
from ..core.fields import Provenance
from ..core.storage import refuse_unwritable_folder
from ..core.sums import Tally
from ..data.batches import Batches, fingerprint, found_in, new_digest
from ..data.data import Data
from ..data.labels import NO_LABEL, warn_of_unused
from ..engine.chosen_analyzers import shared_tokens, with_tokenizer
from ..engine.report_assembly import record
from ..lens.targets import answers, usual_labels
from ..sources.inputs import position_counter
from ..sources.split_model import SplitModel
from .activation_store import ActivationStore, StitchData
from .adapter import Adapter
from .fitting import BackLoss, Progress, Trained, descend, least_squares, start_of
from .spec import StitchSpec

JUDGED = ("tokens", "loss", "back_loss", "correct", "back_correct")


@dataclass(frozen=True)
class StitchRun:
    """A finished stitch: targets, losses and correct predictions by batch, the adapter, and the record of its fit."""

    judged: Mapping[str, Tensor]
    curve: tuple[float, ...]
    adapter: Adapter
    explained: float
    stopped: int

    def note(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The stitch as notes and tensors for a file."""
        parts = {"weight": self.adapter.weight, "bias": self.adapter.bias}
        tensors = dict(self.judged) | {name: part for name, part in parts.items() if part is not None}
        plain = {"done": True, "kind": self.adapter.kind, "explained": self.explained, "stopped": self.stopped}
        return plain, tensors | {"curve": torch.tensor(self.curve, dtype=torch.float64)}

    @staticmethod
    def read(note: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StitchRun:
        """The stitch from the notes and tensors of a file."""
        adapter = Adapter(note["kind"], tensors.get("weight"), tensors.get("bias"))
        judged = {name: tensors[name] for name in JUDGED}
        return StitchRun(judged, tuple(tensors["curve"].tolist()), adapter, note["explained"], note["stopped"])


class StitchExperiment:
    """Fits and evaluates each stitch of one call of `stitch` or `stitch_grid`.

    A context: inside it dropout is off and no gradient reaches the models' weights.

    Args:
        models: every model.
        backs: models that are used as backs.
        data: data for the fit, and for the evaluation if `eval_data` is None.
        spec: the adapter and its fit.
        eval_data: see `stitch`.
        labels: see `stitch`.
        cache: folder for the front model's activations; None for memory.
        layers: module paths of the blocks that the call names.
    """

    def __init__(
        self,
        models: list[SplitModel],
        backs: list[SplitModel],
        data: Data,
        spec: StitchSpec,
        eval_data: Any,
        labels: Any,
        cache: str | os.PathLike[str] | None,
        layers: Any = None,
    ) -> None:
        self.layers = layers
        self.models, self.backs, self.spec = models, backs, spec
        self.cache = None if cache is None else Path(cache)
        if self.cache is not None:
            refuse_unwritable_folder(self.cache, "cache")
        shared = models[0].model
        for other in models[1:]:
            shared = shared_tokens(shared, other.model, given=data.tokenizer is not None)
        known = next((each.model.tokenizer for each in models if each.model.tokenizer is not None), None)
        shared = with_tokenizer(replace(shared, tokenizer=known), data.tokenizer)
        self.labels = usual_labels(labels, [(back.model, back.module) for back in backs], data.source)
        if isinstance(self.labels, Tensor) and eval_data is not None:
            raise LayersimError(
                "`labels` is a table, which cannot be used with `eval_data`. Use labels='data' and a column `labels` in both "
                "data sets."
            )
        labelled = self.labels == "data" if isinstance(self.labels, str) else False
        self.batches = Batches(data, shared, labelled, position_counter([each.source for each in models]))
        held_out = None
        if eval_data is not None:
            judged = data.like(eval_data)
            held_out = replace(self.batches, data=judged, model=with_tokenizer(shared, judged.tokenizer))
        self.tokenizer = shared.tokenizer
        head = backs[0].model.head
        self.unit = "token" if head is None or head.reads == "every" else "row"
        self.data = StitchData.of(self.batches, held_out, self.labels, backs[0].model, spec.fit != "")
        self._columns = found_in(self.batches, *([] if held_out is None else [held_out]))
        wide = any(each.model.dtype == "torch.float64" for each in models)
        self.dtype = torch.float64 if wide else torch.float32
        self._back_scores: dict[int, dict[str, Tensor]] = {}
        self._checked: set[tuple[int, int]] = set()
        self._stack = ExitStack()

    def __enter__(self) -> StitchExperiment:
        self._report_traffic()
        for each in self.models:
            self._stack.enter_context(each.evaluating())
            each.settle(self.data.evaluation[0])
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def identity(self) -> dict[str, Any]:
        """Models, data, settings and version of the call; those of a checkpoint must be equal."""
        return {
            "models": [each.model.identity("checkpoint") for each in self.models],
            "blocks": self.layers,
            "task": self.spec.options() | {"seed": self.spec.training.seed},
            "data": self.batches.record() | {"digest": self._digest(with_targets=True)},
            "version": version("tl_layersim"),
        }

    def _digest(self, with_targets: bool = False) -> str:
        """The SHA-256 of the rows of fit and evaluation, with or without their targets."""
        digest = new_digest()
        # Identities of checkpoints contain these two words.
        for role, part in ((b"fit", self.data.fit), (b"judged", self.data.evaluation)):
            for batch in part:
                fingerprint(digest, batch)
                if with_targets:
                    digest.update(role + answers(batch, self.labels, self.backs[0].model).numpy().tobytes())
        hexadecimal: str = digest.hexdigest()
        return hexadecimal

    def provenance(self, models: list[SplitModel], seconds: float, more: Mapping[str, Any]) -> Provenance:
        """The provenance of the run; `tokens`, `sequences` and `batches` count the evaluation data."""
        held_out, fit = self.data.evaluation, self.data.fit
        tokens = sum(int((answers(b, self.labels, self.backs[0].model) != NO_LABEL).sum()) for b in held_out)
        tally = Tally(len(held_out), sum(len(b.tokens) for b in held_out), tokens, self._digest(), seconds)
        options = self.batches.record() | self._columns | self.spec.options() | dict(more)
        options |= {"labels": self.labels if isinstance(self.labels, str) else "a table"}
        options |= {"fit_batches": len(fit), "fit_positions": sum(int(b.attention.sum()) for b in fit)}
        seed = self.spec.training.seed if "sgd" in self.spec.fit else None
        provenance = record([each.model for each in models], tally, options, seed)
        warn_of_unused(self.labels, replace(provenance, sequences=sum(len(b.tokens) for b in (*fit, *held_out))))
        return provenance

    def activations(self, front: SplitModel, layer: int) -> tuple[ActivationStore, ActivationStore]:
        """The front model's activations at a layer, on the fit data and on the evaluation data."""
        return ActivationStore(front, layer, self.data.fit), ActivationStore(front, layer, self.data.evaluation)

    def cell(
        self,
        key: str,
        front: SplitModel,
        back: SplitModel,
        at: tuple[int, ...],
        acts: tuple[ActivationStore, ActivationStore],
        keep: Progress,
    ) -> StitchRun:
        """Fit and evaluate one stitch, or read it from the file."""
        if keep.done(key) and (whole := keep.get(key, StitchRun.read)) is not None:
            return whole
        self._check(back, at[1])
        # Trouble with the data of the evaluation ought to come before the work.
        self._scores_of_back(back)
        state, start, explained = keep.get(key, _read_training) or (Trained(), None, float("nan"))
        with ExitStack() as stack:
            with keep.saved_on_interrupt():
                if "sgd" in self.spec.fit:
                    stack.enter_context(acts[0].keep(self.cache))
                if start is None:
                    start, explained = self._start(back, at[1], acts[0])
            adapter = start
            if "sgd" in self.spec.fit:
                kept, known = start, explained

                def record(now: Trained) -> None:
                    keep.put(key, *_note_training(now, kept, known))

                targets = [answers(batch, self.labels, back.model) for batch in acts[0].batches]
                data = BackLoss(acts[0], back, at[1], targets)
                adapter, state = descend(start, data, self.spec.training, state, record, keep)
        with keep.saved_on_interrupt():
            judged = self._evaluate(back, at[1], acts[1], adapter)
        cell = StitchRun(judged, state.curve, adapter, explained, state.stopped)
        keep.put(key, *cell.note())
        keep.save()
        return cell

    def _start(self, back: SplitModel, layer: int, acts: ActivationStore) -> tuple[Adapter, float]:
        """The initial adapter of the training, or the finished adapter if nothing is trained; and R² of least squares.

        The adapter has the dtype in which it is evaluated and returned.
        """
        spec = self.spec
        if spec.given is not None:
            return copy.deepcopy(spec.given).to(self.dtype), float("nan")
        if not spec.kind.has_weight:
            return Adapter(spec.kind.name), float("nan")
        if "lstsq" in spec.fit:
            adapter, explained = least_squares(spec.kind, acts, back, layer, spec.ridge)
            return adapter.to(self.dtype), explained
        width = acts[0].shape[-1]
        return start_of(spec.kind, width, back.model.d_model or width).to(self.dtype), float("nan")

    def _evaluate(self, back: SplitModel, layer: int, acts: ActivationStore, adapter: Adapter) -> dict[str, Tensor]:
        """Number of targets, losses and correct predictions of the stitched model and the back, by evaluation batch."""
        alone = self._scores_of_back(back)
        worker = copy.deepcopy(adapter).to(back.device)
        scores = []
        for index in tqdm(range(len(acts)), desc="evaluation", unit="batch", disable=None, leave=False):
            batch = acts.batches[index]
            with torch.no_grad():
                x = worker(acts[index].to(back.device))
            scores.append(back.score(batch, answers(batch, self.labels, back.model), layer, x))
        stitched = _stacked(scores, "loss", "correct")
        bad = (~stitched["loss"].isfinite()).nonzero()[:, 0].tolist()
        if bad:
            point = f"{acts.front.model.layers[acts.layer]} into {back.model.layers[layer]}"
            warn(
                f"The stitched loss and the penalty of {point} are not finite in batches {bad[:5]}. Check the front model's "
                "activations for NaN, and the back model's for overflow."
            )
        return {"tokens": alone["count"], "back_loss": alone["loss"], "back_correct": alone["correct"]} | stitched

    def _scores_of_back(self, back: SplitModel) -> dict[str, Tensor]:
        """Number of targets, losses and correct predictions of the back alone, by evaluation batch; computed once."""
        if id(back) not in self._back_scores:
            each = [back.score(batch, answers(batch, self.labels, back.model)) for batch in self.data.evaluation]
            scores = _stacked(each, "loss", "correct", "count")
            if not bool(scores["loss"].isfinite().all()):
                bad = (~scores["loss"].isfinite()).nonzero()[:, 0].tolist()
                raise LayersimError(
                    f"The loss of {back.model.name} in {back.model.dtype} without stitching is not finite in batches "
                    f"{bad[:5]}. Load it in float32 or bfloat16."
                )
            self._back_scores[id(back)] = scores
        return self._back_scores[id(back)]

    def _check(self, back: SplitModel, layer: int) -> None:
        """Check, once for each back model and layer, that the model can be run from that layer."""
        if (id(back), layer) not in self._checked:
            first = self.data.evaluation[0]
            row = first.first_row
            targets = answers(row, self.labels, back.model)
            if not bool((targets != NO_LABEL).any()):
                row, targets = first, answers(first, self.labels, back.model)
            back.check(row, targets, layer)
            self._checked.add((id(back), layer))

    def _report_traffic(self) -> None:
        """Print the number of bytes and requests that a stitch with a remote model needs, before any is sent."""
        remote = [each for each in self.models if each.local is None]
        if not remote:
            return
        positions = [sum(b.tokens.numel() for b in part) for part in (self.data.fit, self.data.evaluation)]
        width = max(each.model.d_model or 0 for each in self.models)
        bytes_each = 2 if all("16" in each.model.dtype for each in remote) else 4
        words = f"{in_words(bytes_each * width * sum(positions))} of activations at one layer cross for each stitch and side"
        if "sgd" in self.spec.fit and any(each.local is None for each in self.backs):
            mean = positions[0] / max(len(self.data.fit), 1)
            words += (
                f", and in training {in_words(2 * bytes_each * width * mean)} at each of {self.spec.training.steps:,} steps"
            )
        requests = 2 * (len(self.data.fit) + len(self.data.evaluation))
        tqdm.write(
            f"{words}; about {requests} requests without training. Activations of other layers stay on the server.",
            file=sys.stderr,
        )


def _stacked(scores: list[dict[str, Tensor]], *names: str) -> dict[str, Tensor]:
    """Stack the scores of batches into one tensor, `batch`, for each name."""
    return {name: torch.stack([score[name].double() for score in scores]) for name in names}


def _note_training(state: Trained, start: Adapter | None, explained: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of a training as notes and tensors for a file."""
    note: dict[str, Any] = {
        "done": False,
        "step": state.step,
        "best": state.best,
        "stopped": state.stopped,
        "explained": explained,
    }
    tensors = dict(state.tensors) | {"curve": torch.tensor(state.curve, dtype=torch.float64)}
    if start is not None and start.weight is not None:
        note["kind"] = start.kind
        tensors["start weight"] = start.weight
        tensors |= {} if start.bias is None else {"start bias": start.bias}
    return note, tensors


def _read_training(note: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Trained, Adapter | None, float]:
    held = {name: value for name, value in tensors.items() if name != "curve" and not name.startswith("start")}
    state = Trained(note["step"], held, tuple(tensors["curve"].tolist()), note["best"], note["stopped"])
    start = Adapter(note["kind"], tensors["start weight"], tensors.get("start bias")) if "kind" in note else None
    return state, start, note["explained"]
