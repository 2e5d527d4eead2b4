"""Picture: a figure that a report shows for a result, and its explanation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Picture:
    """A figure that a report shows for a result.

    Attributes:
        field: the tensor field that it shows.
        title: of the figure.
        meaning: a sentence that explains the figure and names its source.
    """

    field: str
    title: str
    meaning: str
