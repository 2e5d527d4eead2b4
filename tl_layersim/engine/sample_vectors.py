"""`vectors`: a random sample of the activations of a model, in memory or in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, ClassVar

import numpy as np
import psutil
import torch
from torch import Tensor

from ..activations.view import Kernel, View
from ..analyzers.analyzer import Analyzer, Run
from ..analyzers.needs import Needs
from ..core.arguments import FilePath, PositiveInt, Seed, typed
from ..core.arrays import RESERVED
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError, in_words, shown
from ..core.file_format import refuse_unwritable, replacing
from ..core.integer_hash import mixed
from ..core.results import Result
from ..core.resumable_file import ResumableFile
from ..core.sums import Sums
from ..sources.open_local import OpenedModel
from ..sources.sampled_vectors import SampledVectors
from .analyze_and_compare import opened_analysis
from .report_assembly import refuse_empty
from .run import run
from .run_description import DataPart
from .site_plan import DEFAULT, AtArgument
from .vectors_as_data import data_of_call

# What is kept of each sample beside its vectors.
ABOUT_SAMPLES = ("rows", "positions", "texts")
# Counted positions whose random numbers are compared at once.
NUMBERS_AT_ONCE = 1 << 20


def chosen_numbers(total: int, most: int, seed: int) -> Tensor:
    """A uniform sample without replacement of the numbers 0 to `total` - 1, ascending.

    Each number gets a pseudo-random key from itself and the seed; the numbers with the smallest keys are chosen.

    Args:
        total: number of counted positions.
        most: largest number of samples.
        seed: random seed.

    Examples:
        >>> chosen_numbers(10, 3, seed=0).tolist(), chosen_numbers(2, 3, seed=0).tolist()
        ([1, 4, 5], [0, 1])
    """
    chosen = torch.zeros(0, dtype=torch.int64)
    key_of_seed = mixed(torch.tensor(seed + 1))
    for start in range(0, total, NUMBERS_AT_ONCE):
        further = torch.arange(start, min(start + NUMBERS_AT_ONCE, total))
        chosen = torch.cat([chosen, further])
        # Twice, because keys of neighbouring seeds are otherwise permutations of each other.
        order = mixed(mixed(chosen) + key_of_seed).argsort()
        chosen = chosen[order[:most]]
    return chosen.sort().values


@dataclass
class Sample:
    """The samples of a run, which kernels fill in the order of the data.

    Attributes:
        file: file that receives the vectors; None to keep them in memory.
        numbers: numbers of the samples among all counted positions, ascending.
        seen: number of counted positions so far.
        rows_seen: number of rows so far.
        widths: width of each site.
        by_site: vectors of each site, `sample width`; empty if they are in the file.
        offsets: for each site, the place of its vectors in the file.
        about: for each name in `ABOUT_SAMPLES`, `sample`.
    """

    file: BinaryIO | None
    numbers: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    seen: int = 0
    rows_seen: int = 0
    widths: dict[str, int] = field(default_factory=dict)
    by_site: dict[str, np.ndarray] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    about: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, view: View) -> None:
        """Add the samples among the counted positions of whole rows.

        Args:
            view: activations of the next rows.
        """
        if not self.about:
            self._begin(view)
        first, last = torch.searchsorted(self.numbers, torch.tensor([self.seen, self.seen + len(view.tokens)])).tolist()
        index = self.numbers[first:last] - self.seen
        places = slice(first, last)
        assert view.row is not None
        assert view.column is not None
        row_number = self.rows_seen + torch.unique_consecutive(view.sequence.cpu(), return_inverse=True)[1]
        text = (view.row if view.text is None else view.text).cpu()
        # A row that joins several texts is a text of its own.
        text = torch.where(text < 0, -1 - row_number, text)
        self.about["rows"][places] = view.row.cpu()[index].numpy()
        self.about["positions"][places] = view.column.cpu()[index].numpy()
        self.about["texts"][places] = text[index].numpy()
        for site, activations in zip(view.sites, view.activations, strict=True):
            chosen = activations[index.to(activations.device), : self.widths[site]]
            self._write(site, first, chosen.float().cpu().contiguous().numpy())
        self.seen += len(view.tokens)
        self.rows_seen = int(row_number[-1]) + 1

    def _begin(self, view: View) -> None:
        """Make room for the samples, when the sites and their widths are known.

        Raises:
            LayersimError: the samples are larger than the free memory.
        """
        count = len(self.numbers)
        widths = view.widths or (view.activations.shape[-1],) * len(view.activations)
        self.widths = dict(zip(view.sites, widths, strict=True))
        for name in ABOUT_SAMPLES:
            self.about[name] = np.zeros(count, dtype=np.int64)
        if self.file is not None:
            header, self.offsets = _layout(self.widths, count)
            self.file.write(header)
            return
        need = 4 * count * sum(self.widths.values())
        free = psutil.virtual_memory().available
        if need > free:
            raise LayersimError(
                f"`max_samples` gives {count} samples, which need {in_words(need)} at {len(self.widths)} sites; "
                f"{in_words(free)} are free. Pass `path`, fewer samples or fewer sites."
            )
        for site, width in self.widths.items():
            self.by_site[site] = np.zeros((count, width), dtype=np.float32)

    def _write(self, site: str, first: int, vectors: np.ndarray) -> None:
        """Write vectors of one site.

        Args:
            site: name of the site.
            first: index of the first of the samples.
            vectors: `sample width`.
        """
        if self.file is None:
            self.by_site[site][first : first + len(vectors)] = vectors
            return
        self.file.seek(self.offsets[site] + first * vectors.shape[1] * vectors.itemsize)
        self.file.write(vectors.tobytes())

    def finish_file(self) -> None:
        """Write rows, positions and texts of the samples into the file."""
        assert self.file is not None
        for name, values in self.about.items():
            self.file.seek(self.offsets[RESERVED + name])
            self.file.write(values.tobytes())


def _layout(widths: Mapping[str, int], count: int) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and the place of each tensor.

    Args:
        widths: widths of the sites.
        count: number of samples.
    """
    # Wide dtypes first, so that each tensor is aligned to its dtype.
    shapes: dict[str, tuple[str, list[int]]] = {}
    for name in ABOUT_SAMPLES:
        shapes[RESERVED + name] = ("I64", [count])
    for site, width in widths.items():
        shapes[site] = ("F32", [count, width])
    entries: dict[str, dict[str, Any]] = {}
    begin = 0
    for name, (dtype, shape) in shapes.items():
        end = begin + math.prod(shape) * (8 if dtype == "I64" else 4)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    front = len(header).to_bytes(8, "little") + header
    return front, {name: len(front) + entry["data_offsets"][0] for name, entry in entries.items()}


@dataclass(frozen=True, eq=False)
class VectorSampler(Analyzer):
    """Keeps a sample of the vectors. A first pass without the model counts the positions among which it is drawn.

    Attributes:
        max_samples: largest number of samples.
        seed: random seed.
        sample: receives the samples.
    """

    name: ClassVar[str] = "vectors"
    needs = Needs(first_pass="data", in_process=True)

    max_samples: int
    seed: int
    sample: Sample

    def first_kernel(self) -> Kernel:
        return count_samples

    def kernel(self, first: Sums) -> Kernel:
        self.sample.numbers = chosen_numbers(int(first["samples"]), self.max_samples, self.seed)
        return partial(keep_samples, sample=self.sample)

    def compute(self, sums: Sums, run: Run) -> Result:
        raise NotImplementedError("samples have no result")


def count_samples(view: View) -> dict[str, Tensor]:
    """Number of counted positions."""
    return {"samples": torch.tensor(len(view.tokens))}


def keep_samples(view: View, *, sample: Sample) -> dict[str, Tensor]:
    """Add the chosen counted positions of a view to a sample. This kernel needs a model in this process.

    Args:
        view: activations of whole rows, in the order of the data.
        sample: receives the vectors.
    """
    sample.add(view)
    return count_samples(view)


@typed
def vectors(
    model: Any,
    data: Any = None,
    *,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    max_samples: PositiveInt = 10_000,
    seed: Seed = 0,
    path: FilePath | None = None,
) -> SampledVectors:
    """A random sample of the vectors of a model, for other programs and for your own measures.

    Samples are drawn from all counted positions of the data, each with the same probability, without replacement. The data is
    read twice, and the model runs once. `from_vectors` takes the result.

    Args:
        model: a model in this process, as in `analyze`.
        data: as in `analyze`.
        at: the sites to read, see `analyze`.
        per_head: see `analyze`.
        max_samples: largest number of samples; data with fewer counted positions gives all of them.
        seed: random seed of the draw. The same seed draws the same positions for every model that counts the same ones.
        path: a safetensors file for the vectors, which are then not held in memory: the arrays of the result are memory maps.

    Returns:
        `SampledVectors`: float32 arrays `sample width` by site, such as `sampled["blocks.3.hook_resid_post"]`, with `rows`,
        `positions` and `texts` of the samples, in the order of the data.

    Raises:
        LayersimError: the model is on a server, from which only sums return; or the samples are larger than the free memory.

    Examples:
        >>> import tl_layersim as lsim
        >>> sampled = lsim.vectors(lsim.demo_model(), lsim.demo_text()[:4], max_samples=50)
        >>> sampled["blocks.3.hook_resid_post"].shape, sampled.rows.shape
        ((50, 128), (50,))
    """
    opened = OpenedModel.of(model)
    data = data_of_call(data, [opened])
    if opened.on_server:
        raise LayersimError(f"`remote` is {shown(opened.remote)}; vectors stay on a server, from which only sums return.")
    _, ranks = rank_and_size()
    if ranks > 1:
        raise LayersimError(f"`vectors` cannot be used in a torch.distributed group of {ranks} ranks. Call it in one process.")
    refuse_unwritable(path, "path")
    with ExitStack() as stack:
        file = None if path is None else stack.enter_context(replacing(path))
        sample = Sample(file)
        sampler = VectorSampler(max_samples, seed, sample)
        analysis = opened_analysis([opened], data, {sampler.name: sampler}, at, per_head, False)
        analysis.check()
        analysis.read_ahead()
        tally = run(analysis, DataPart(), ResumableFile(None, "checkpoint", {}), {}).state.tally
        refuse_empty(tally.tokens, tally.sequences)
        if file is not None:
            sample.finish_file()
    by_site = sample.by_site
    if path is not None:
        by_site = {}
        for site, width in sample.widths.items():
            shape = (len(sample.numbers), width)
            by_site[site] = np.memmap(path, np.float32, "r", sample.offsets[site], shape)
    return SampledVectors(by_site, **sample.about)
