"""`SampledVectors`: vectors of some samples of a run, by site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class SampledVectors(Mapping[str, np.ndarray]):
    """Vectors of a random sample of the counted positions, by site: `sampled["blocks.3.hook_resid_post"]`.

    Samples are in the order of the data.

    Attributes:
        by_site: for each site, `sample width`, float32.
        rows: `sample`, index of the row in the data; -1 if the row joins several texts.
        positions: `sample`, position in this row.
        texts: `sample`, index of the text among the texts that were read. Samples of one text depend on each other.
    """

    by_site: Mapping[str, np.ndarray]
    rows: np.ndarray
    positions: np.ndarray
    texts: np.ndarray

    def __getitem__(self, site: str) -> np.ndarray:
        return self.by_site[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_site)

    def __len__(self) -> int:
        return len(self.by_site)

    def __repr__(self) -> str:
        return f"SampledVectors({len(self.rows)} samples of {len(np.unique(self.texts))} texts, {len(self)} sites)"
