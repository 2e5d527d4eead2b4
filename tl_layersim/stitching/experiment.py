"""Where stitches are fitted and judged: models, data and settings of one call."""

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

from ..analysis.report_assembly import record
from ..analysis.validation import shared_tokens, with_tokenizer
from ..core.errors import LayersimError, in_words, warn
from ..core.provenance import Provenance
from ..core.storage import refuse_unwritable_folder
from ..core.tally import Tally
from ..data.batches import Batches, found_in
from ..data.digest import fingerprint, new_digest
from ..data.labels import NO_LABEL, warn_of_unused
from ..data.options import DataOptions
from ..models.adapter import Adapter
from ..models.split_model import SplitModel
from ..models.targets import answers, usual_labels
from .activation_store import ActivationStore, StitchData
from .fitting import BackLoss, Trained, descend, least_squares, start_of
from .progress import Progress
from .spec import StitchSpec

JUDGED = ("tokens", "loss", "back_loss", "correct", "back_correct")


@dataclass(frozen=True)
class StitchRun:
    """One stitch, judged: by batch how many answers, losses and hits; the adapter and how it came."""

    judged: Mapping[str, Tensor]
    curve: tuple[float, ...]
    adapter: Adapter
    explained: float
    stopped: int

    def note(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For a file."""
        parts = {"weight": self.adapter.weight, "bias": self.adapter.bias}
        tensors = dict(self.judged) | {name: part for name, part in parts.items() if part is not None}
        plain = {"done": True, "kind": self.adapter.kind, "explained": self.explained, "stopped": self.stopped}
        return plain, tensors | {"curve": torch.tensor(self.curve, dtype=torch.float64)}

    @staticmethod
    def read(note: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> StitchRun:
        """From a file."""
        adapter = Adapter(note["kind"], tensors.get("weight"), tensors.get("bias"))
        judged = {name: tensors[name] for name in JUDGED}
        return StitchRun(judged, tuple(tensors["curve"].tolist()), adapter, note["explained"], note["stopped"])


class StitchExperiment:
    """Models, data and settings of a call: where stitches are fitted and judged."""

    def __init__(
        self,
        halves: list[SplitModel],
        backs: list[SplitModel],
        data: Any,
        task: StitchSpec,
        options: Mapping[str, Any],
        reading: DataOptions,
        cache: str | os.PathLike[str] | None,
        layers: Any = None,
    ) -> None:
        self.layers = layers
        self.halves, self.backs, self.task = halves, backs, task
        self.cache = None if cache is None else Path(cache)
        if self.cache is not None and "sgd" not in task.fit:
            raise LayersimError(
                "Nothing is kept where nothing is trained by gradients.",
                given=f"cache={cache} with fit={task.fit!r}",
                expected="fit='sgd' or 'lstsq+sgd'",
                do="leave cache= out",
            )
        if self.cache is not None:
            refuse_unwritable_folder(self.cache, "cache")
        shared = halves[0].model
        for other in halves[1:]:
            shared = shared_tokens(shared, other.model, given=options["tokenizer"] is not None)
        known = next((half.model.tokenizer for half in halves if half.model.tokenizer is not None), None)
        shared = with_tokenizer(replace(shared, tokenizer=known), options["tokenizer"])
        self.labels = usual_labels(options["labels"], [(back.model, back.module) for back in backs])
        if isinstance(self.labels, Tensor) and options["eval_data"] is not None:
            raise LayersimError(
                "A table of labels belongs to one data set, and here are two.",
                given="labels= as a table, with eval_data=",
                expected="labels beside the rows of each",
                do="labels='data' and a column `labels` in data and eval_data",
            )
        labelled = self.labels == "data" if isinstance(self.labels, str) else False
        self.batches = Batches(data, shared, reading, labelled)
        judged = None if options["eval_data"] is None else replace(self.batches, data=options["eval_data"])
        self.tokenizer = shared.tokenizer
        head = backs[0].model.head
        self.unit = "token" if head is None or head.reads == "every" else "row"
        self.material = StitchData.of(self.batches, judged, self.labels, backs[0].model, task.fit != "")
        self._found = found_in(self.batches, *([] if judged is None else [judged]))
        wide = any(half.model.dtype == "torch.float64" for half in halves)
        self.dtype = torch.float64 if wide else torch.float32
        self._own: dict[int, dict[str, Tensor]] = {}
        self._checked: set[tuple[int, int]] = set()
        self._stack = ExitStack()

    def __enter__(self) -> StitchExperiment:
        self._say_what_crosses()
        for half in self.halves:
            self._stack.enter_context(half.evaluating())
            half.settle(self.material.judged[0])
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {
            "models": [(m.name, m.config_hash, m.weights_hash, m.source, m.dtype) for m in (h.model for h in self.halves)],
            "blocks": self.layers,
            "task": self.task.options() | {"seed": self.task.seed},
            "data": self.batches.record() | {"digest": self._digest(answered=True)},
            "version": version("tl_layersim"),
        }

    def _digest(self, answered: bool = False) -> str:
        """SHA-256 of the rows of the fit and of the judgement, with what is asked of them or without."""
        digest = new_digest()
        for role, part in ((b"fit", self.material.fit), (b"judged", self.material.judged)):
            for batch in part:
                fingerprint(digest, batch)
                if answered:
                    digest.update(role + answers(batch, self.labels, self.backs[0].model).numpy().tobytes())
        found: str = digest.hexdigest()
        return found

    def provenance(self, halves: list[SplitModel], seconds: float, more: Mapping[str, Any]) -> Provenance:
        """The record; `tokens`, `sequences` and `batches` are those of the judgement."""
        judged, fit = self.material.judged, self.material.fit
        tokens = sum(int((answers(b, self.labels, self.backs[0].model) != NO_LABEL).sum()) for b in judged)
        tally = Tally({}, len(judged), sum(len(b.tokens) for b in judged), tokens, self._digest(), seconds)
        options = self.batches.record() | self._found | self.task.options() | dict(more)
        options |= {"labels": self.labels if isinstance(self.labels, str) else "a table"}
        options |= {"fit_batches": len(fit), "fit_positions": sum(int(b.attention.sum()) for b in fit)}
        found = record([half.model for half in halves], tally, options, self.task.seed if "sgd" in self.task.fit else None)
        warn_of_unused(self.labels, replace(found, sequences=sum(len(b.tokens) for b in (*fit, *judged))))
        return found

    def activations(self, front: SplitModel, layer: int) -> tuple[ActivationStore, ActivationStore]:
        """The front's, of the fit and of the judgement."""
        return ActivationStore(front, layer, self.material.fit), ActivationStore(front, layer, self.material.judged)

    def cell(
        self,
        key: str,
        front: SplitModel,
        back: SplitModel,
        at: tuple[int, ...],
        acts: tuple[ActivationStore, ActivationStore],
        keep: Progress,
    ) -> StitchRun:
        """Fit and judge one stitch, or take it from the file."""
        if keep.done(key) and (whole := keep.get(key, StitchRun.read)) is not None:
            return whole
        self._check(back, at[1])
        # Trouble with the data that judges ought to come before the work.
        self._own_scores(back)
        state, start, explained = keep.get(key, _read_training) or (Trained(), None, float("nan"))
        with ExitStack() as stack:
            with keep.saved_on_interrupt():
                if "sgd" in self.task.fit:
                    stack.enter_context(acts[0].keep(self.cache))
                if start is None:
                    start, explained = self._start(back, at[1], acts[0])
            adapter = start
            if "sgd" in self.task.fit:
                kept, known = start, explained

                def record(now: Trained) -> None:
                    keep.put(key, *_note_training(now, kept, known))

                targets = [answers(batch, self.labels, back.model) for batch in acts[0].batches]
                data = BackLoss(acts[0], back, at[1], targets)
                adapter, state = descend(start, data, self.task.training, self.task.seed, state, record, keep)
        with keep.saved_on_interrupt():
            judged = self._judge(back, at[1], acts[1], adapter)
        cell = StitchRun(judged, state.curve, adapter, explained, state.stopped)
        keep.put(key, *cell.note())
        keep.save()
        return cell

    def _start(self, back: SplitModel, layer: int, acts: ActivationStore) -> tuple[Adapter, float]:
        """The adapter that is done, or where training begins, in the dtype in which it is judged and given back; and R²."""
        task = self.task
        if task.given is not None:
            return copy.deepcopy(task.given).to(self.dtype), float("nan")
        if task.kind == "identity":
            return Adapter("identity"), float("nan")
        if "lstsq" in task.fit:
            found, explained = least_squares(task.kind, acts, back, layer, task.ridge)
            return found.to(self.dtype), explained
        width = acts[0].shape[-1]
        return start_of(task.kind, width, back.model.d_model or width).to(self.dtype), float("nan")

    def _judge(self, back: SplitModel, layer: int, acts: ActivationStore, adapter: Adapter) -> dict[str, Tensor]:
        """By batch: answers, losses and hits of the stitched model and of the back by itself."""
        own = self._own_scores(back)
        worker = copy.deepcopy(adapter).to(back.device)
        scores = []
        for index in tqdm(range(len(acts)), desc="judging", unit="batch", disable=None, leave=False):
            batch = acts.batches[index]
            with torch.no_grad():
                x = worker(acts[index].to(back.device))
            scores.append(back.score(batch, answers(batch, self.labels, back.model), layer, x))
        found = _stacked(scores, "loss", "correct")
        bad = (~found["loss"].isfinite()).nonzero()[:, 0].tolist()
        if bad:
            seam = f"{acts.front.model.layers[acts.layer]} into {back.model.layers[layer]}"
            warn(
                f"The stitched loss of {seam} is not finite in batches {bad[:5]}, and so is the penalty: look "
                "for NaN in the front, and for what overflows in the back."
            )
        return {"tokens": own["count"], "back_loss": own["loss"], "back_correct": own["correct"]} | found

    def _own_scores(self, back: SplitModel) -> dict[str, Tensor]:
        if id(back) not in self._own:
            scores = [back.score(batch, answers(batch, self.labels, back.model)) for batch in self.material.judged]
            found = _stacked(scores, "loss", "correct", "count")
            if not bool(found["loss"].isfinite().all()):
                bad = (~found["loss"].isfinite()).nonzero()[:, 0].tolist()
                raise LayersimError(
                    f"The loss of {back.model.name} by itself is not finite.",
                    given=f"batches {bad[:5]}, in {back.model.dtype}",
                    expected="finite logits",
                    do="load it in float32 or bfloat16",
                )
            self._own[id(back)] = found
        return self._own[id(back)]

    def _check(self, back: SplitModel, layer: int) -> None:
        """Once for each place of entry: that the model can be entered there."""
        if (id(back), layer) not in self._checked:
            first = self.material.judged[0]
            row = first.first_row
            wanted = answers(row, self.labels, back.model)
            if not bool((wanted != NO_LABEL).any()):
                row, wanted = first, answers(first, self.labels, back.model)
            back.check(row, wanted, layer)
            self._checked.add((id(back), layer))

    def _say_what_crosses(self) -> None:
        """What two models in different places will ask of the line, before it is asked."""
        far = [half for half in self.halves if half.is_remote]
        if not far:
            return
        positions = [sum(b.tokens.numel() for b in part) for part in (self.material.fit, self.material.judged)]
        width = max(half.model.d_model or 0 for half in self.halves)
        bytes_each = 2 if all("16" in half.model.dtype for half in far) else 4
        words = f"{in_words(bytes_each * width * sum(positions))} of activations at one layer cross for each stitch and side"
        if "sgd" in self.task.fit and any(half.is_remote for half in self.backs):
            mean = positions[0] / max(len(self.material.fit), 1)
            words += (
                f", and in training {in_words(2 * bytes_each * width * mean)} at each of {self.task.training.steps:,} steps"
            )
        requests = 2 * (len(self.material.fit) + len(self.material.judged))
        tqdm.write(f"{words}; about {requests} requests without training. Activations of other layers stay.", file=sys.stderr)


def _stacked(scores: list[dict[str, Tensor]], *names: str) -> dict[str, Tensor]:
    """Scores of batches, `batch` each."""
    return {name: torch.stack([score[name].double() for score in scores]) for name in names}


def _note_training(state: Trained, start: Adapter | None, explained: float) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Where a training stands, for a file."""
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
