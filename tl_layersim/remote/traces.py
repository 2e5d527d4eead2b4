"""nnsight traces that run on an NDIF server and return sums over activations.

nnsight ships the source of the traces and of the functions that these call, which use local names, torch and the standard
library alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..activations.block_call import first_tensor, gradients
from ..activations.row_pools import AnyKernel, plan_batch, view_of_tokens
from ..activations.view import SiteBuffer, View, reduce
from ..core.sums import added, as_sum, push
from ..sources.nnsight import TraceReader
from ..sources.result_seals import sealed
from ..sources.source import PartialSums
from .failures import UnsafeAnswer, server_text


def submit(
    readers: list[TraceReader],
    work: list[dict[str, Any]],
    kernels: dict[str, AnyKernel],
    calling: bool,
    joined: bool,
    backend: Any,
) -> None:
    """Send a request: an nnsight session with one trace for each model and forward pass.

    The server adds the kernels' results pairwise.

    Forward passes run to the end of the model, because a sandbox fails if a trace follows a stopped one. The result is the
    local variable `found`: text counts, each with the sums over these texts in the form of `Reduced`.

    Args:
        readers: the model; or several edits of one model, whose views the kernels take together.
        work: the batches, packed by `RemoteSource.pack`.
        kernels: kernels of views, and kernels of pools of rows.
        calling: whether views carry block calls.
        joined: whether the sums of leaves are added; if False, they are returned separately.
        backend: backend that sends the request.
    """
    import nnsight

    ticket = backend.ticket
    differentiated = any(reader.differentiated for reader in readers)
    with torch.no_grad(), readers[0].model.session(backend=backend):
        stack: list[Any] = []
        for batch in work:
            texts = batch["texts"]
            plan = plan_batch(
                known_view(batch), batch["starts"], batch["leaf"], batch["density"], kernels, texts, batch["neighbours"]
            )
            outputs: list[Any] = []
            for item in batch["passes"]:
                args = item["args"]
                options = item["options"]
                views: list[Any] = []
                for reader in readers:
                    with reader.model.trace(*args, **options):  # noqa: SIM117 (what follows a trace is shipped)
                        with gradients(differentiated):
                            positions = (item["keep"], item["shape"], item["pooled"], item["has_tokens"])
                            views.append(reader.read(SiteBuffer(reader.names, *positions), item["kept"], calling))
                            # Kernels run inside the trace of the last model, which has the views of all.
                            if len(views) == len(readers):
                                with torch.no_grad():
                                    outputs.append(reduce(plan.kernels_of(item["number"]), *views))
                                if len(outputs) == len(batch["passes"]):
                                    add_leaves(stack, batch["leaf"], batch["block"], plan.finish(outputs), joined)
        found = nnsight.save(sealed(stack, ticket))  # noqa: F841 (a result is taken by this name)


def known_view(batch: dict[str, Any]) -> View:
    """Build a batch's `View` with tokens and row numbers, but without activations.

    `plan_batch` takes this view before any forward pass.

    Args:
        batch: the batch, packed by `RemoteSource.pack`.
    """
    sequence = []
    for item in batch["passes"]:
        buffer = SiteBuffer((), item["keep"], item["shape"], item["pooled"], item["has_tokens"])
        sequence.append(buffer.samples // item["shape"][1] + batch["starts"][item["number"]])
    tokens = torch.cat([item["kept"]["tokens"] for item in batch["passes"]])
    row = torch.cat([item["kept"]["row"] for item in batch["passes"]])
    # Without texts, each row is one.
    text = torch.cat([item["kept"].get("text", item["kept"]["row"]) for item in batch["passes"]])
    rows = torch.cat(sequence)
    return view_of_tokens(tokens, rows, row, text)


def add_leaves(stack: list[Any], leaf: int, block: int | None, leaves: list[Any], joined: bool) -> None:
    """Append a batch's sums over groups of texts (leaves) to `stack`. If `joined`, neighbouring sums are added.

    Args:
        stack: changed in place.
        leaf: number of texts in a leaf.
        block: number of texts in a block of the data; sums are not added across blocks. None for no blocks.
        leaves: outputs of `reduce` for each leaf.
        joined: whether to add the sums of neighbouring leaves.
    """
    for reduced in leaves:
        if joined:
            push(stack, leaf, widened(on_cpu(reduced)), add_batch_sums, 0, block)
        else:
            stack.append((leaf, on_cpu(reduced)))


def dtype_and_devices(
    model: Any, blocks: list[Any], arguments: tuple[tuple[Tensor, ...], dict[str, Any]], backend: Any
) -> dict[str, Any]:
    """Find the dtype and the devices of activations by a request with one row.

    Also returns whether the weights are on the meta device.
    """
    import nnsight

    args, options = arguments
    ticket = backend.ticket
    with torch.no_grad(), model.trace(*args, backend=backend, **options):
        outputs = [first_tensor(block.output) for block in blocks]
        weight = next(iter(blocks[0]._module.parameters()))
        facts = {
            "dtype": str(outputs[0].dtype),
            "devices": [str(output.device) for output in outputs],
            "meta": weight.device.type == "meta",
        }
        found: dict[str, Any] = nnsight.save(sealed(facts, ticket))
    return found


def form_of_facts(value: Any) -> None:
    """Check the form of the result of `dtype_and_devices`.

    Raises:
        UnsafeAnswer: the form differs.
    """
    has_names = isinstance(value, dict) and value.keys() == {"dtype", "devices", "meta"}
    if not has_names or not isinstance(value["meta"], bool) or not isinstance(value["devices"], list):
        raise UnsafeAnswer("must hold dtype, devices and meta; it has another form")
    dtype = getattr(torch, str(value["dtype"]).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UnsafeAnswer(f"names the dtype '{server_text(value['dtype'], most=40)}', which torch does not have")
    for device in value["devices"]:
        try:
            torch.device(device)
        except (RuntimeError, TypeError):
            raise UnsafeAnswer(f"names the device '{server_text(device, most=40)}', which torch does not have") from None


def on_cpu(reduced: Any) -> Any:
    """Move the sums in an output of `reduce` to the CPU."""
    counts, out = reduced
    moved: dict[str, dict[str, Tensor]] = {}
    for name, sums in out.items():
        moved[name] = {key: value.detach().cpu() for key, value in sums.items()}
    return counts, moved


def widened(reduced: Any) -> Any:
    """Convert the sums in an output of `reduce`: floats to float64, integers to int64."""
    counts, out = reduced
    wide: dict[str, dict[str, Tensor]] = {}
    for name, sums in out.items():
        wide[name] = {key: as_sum(value) for key, value in sums.items()}
    return counts, wide


def add_batch_sums(a: Any, b: Any) -> Any:
    """Add the sums over two groups of batches: floats in float64, integers in int64.

    If activations are not finite, only the counts are kept.

    Raises:
        LayersimError: sums of a kernel have different shapes.
    """
    counts_a, out_a = a
    counts_b, out_b = b
    counts = [count_a + count_b for count_a, count_b in zip(counts_a, counts_b, strict=True)]
    if any(bool(count.any()) for count in counts):
        return counts, {}
    total: dict[str, dict[str, Tensor]] = {}
    for name, sums_a in out_a.items():
        # A leaf has no sums if it has no samples, or if no pool ends in the leaf.
        total[name] = added(sums_a, out_b[name], name)
    return counts, total


def partial_sums(result: list[tuple[int, Any]]) -> list[PartialSums]:
    """Convert a request's result to a list of `PartialSums`."""
    return [PartialSums(count, not_finite, out) for count, (not_finite, out) in result]


@dataclass(frozen=True)
class FormOfSums:
    """The form of the result of `submit`.

    Attributes:
        texts: number of texts whose sums return.
        sites: for each model, the number of its sites.
        kernels: names of the kernels.
        joined: whether the sums were added, and so are float64 or int64.
    """

    texts: int
    sites: tuple[int, ...]
    kernels: tuple[str, ...]
    joined: bool

    def __call__(self, value: Any) -> None:
        """Check a result.

        Raises:
            UnsafeAnswer: names the sum whose form differs.
        """
        if not isinstance(value, list):
            raise UnsafeAnswer(f"must be a list of sums; it is of type {type(value).__name__}")
        total = 0
        is_finite = True
        for part in value:
            count, not_finite, out = _three_of(part)
            is_finite = self._check_counts(count, not_finite) and is_finite
            total += count
            if not isinstance(out, dict):
                raise UnsafeAnswer("must hold the sums of each analyzer; a part of it has another form")
            if is_finite and out.keys() != set(self.kernels):
                raise UnsafeAnswer(f"must hold the sums of {_listed(self.kernels)}; it holds those of {_listed(out)}")
            for name, sums in out.items():
                self._check_sums(name, sums)
        # Sums end where activations are not finite.
        if is_finite and total != self.texts:
            raise UnsafeAnswer(f"must hold the sums of {self.texts} texts; it holds those of {total}")

    def _check_counts(self, count: Any, not_finite: Any) -> bool:
        """Check the counts of one part, and return whether its activations are finite."""
        # A request for one leaf of all its texts may have any number of them.
        is_whole = type(count) is int and (count == self.texts or (count > 0 and count & (count - 1) == 0))
        if not is_whole:
            raise UnsafeAnswer("has a number of texts that is no power of two")
        if not isinstance(not_finite, list | tuple) or len(not_finite) != len(self.sites):
            raise UnsafeAnswer("must count the activations that are not finite; it has another form")
        for number, sites in zip(not_finite, self.sites, strict=True):
            counts = isinstance(number, Tensor) and number.dtype == torch.int64 and tuple(number.shape) == (sites,)
            if not counts or bool((number < 0).any()):
                raise UnsafeAnswer(f"must count the activations that are not finite at {sites} sites; it has another form")
        return not any(bool(number.any()) for number in not_finite)

    def _check_sums(self, name: str, sums: Any) -> None:
        if not isinstance(sums, dict):
            raise UnsafeAnswer(f"must hold named sums of {_listed([name])}; they have another form")
        for key, value in sums.items():
            sum_name = f"the sum {_listed([key])} of {_listed([name])}"
            if not isinstance(value, Tensor):
                raise UnsafeAnswer(f"must hold tensors; {sum_name} is of type {type(value).__name__}")
            if self.joined and value.dtype not in (torch.float64, torch.int64):
                raise UnsafeAnswer(f"must hold sums in float64 or int64; {sum_name} is in {value.dtype}")


def _three_of(part: Any) -> tuple[Any, Any, Any]:
    """The number of texts, the counts and the sums of one part of a result."""
    try:
        count, (not_finite, out) = part
    except (TypeError, ValueError):
        raise UnsafeAnswer("must be a list of sums with their numbers of texts; it has another form") from None
    return count, not_finite, out


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{server_text(name, most=60)}'" for name in list(names)[:8]) or "nothing"
