"""The activations of data that fits into one forward pass, for an analysis that passes over its data twice."""

from __future__ import annotations

from ..activations.view import View
from ..data.batches import Batch


class KeptActivations:
    """The activations of the first forward pass of a run, until a second forward pass is needed.

    They are needed again only if all data fits into one forward pass. With more data they are dropped before the second forward
    pass, so that memory never holds the activations of two.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._view: View | None = None
        self._forward_passes = 0

    def of(self, batch: Batch) -> View | None:
        """The activations of rows that have run before; None if they must run, and then nothing is kept any more.

        Args:
            batch: the rows.
        """
        if self._view is not None and self._batch is not None and batch.has_rows_of(self._batch):
            return self._view
        self._batch = None
        self._view = None
        return None

    def keep(self, batch: Batch, view: View) -> None:
        """Keep the activations of a forward pass if it is the first one.

        Args:
            batch: the rows.
            view: their activations.
        """
        self._forward_passes += 1
        if self._forward_passes == 1:
            self._batch = batch
            self._view = view
