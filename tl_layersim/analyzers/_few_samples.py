"""Warnings of fits to fewer samples than dimensions, and of few held-out rows."""

from __future__ import annotations

from ..core.errors import warn
from ..core.wording import amount

# Below this number of held-out rows a warning is given: with 20 rows, the standard error of an accuracy of .7 is .10.
FEW_HELD_OUT_ROWS = 20


def warn_of_few_samples(measure: str, samples: int, width: int, unit: str) -> None:
    """Warn of a fit to fewer samples than dimensions.

    Args:
        measure: name of the analyzer.
        samples: that it is fitted on.
        width: of the widest site.
        unit: what a sample is, in the plural.
    """
    if samples < width:
        warn(
            f"{measure} is fitted on {samples:,} {unit} of {width:,} dimensions. With fewer samples than dimensions the result "
            "depends on the number of samples: pass more data, or compare sites on equal numbers."
        )


def warn_of_few_rows(measure: str, rows: int) -> None:
    """Warn of few held-out rows.

    Args:
        measure: name of the analyzer.
        rows: number of held-out rows with samples.
    """
    if rows < FEW_HELD_OUT_ROWS:
        warn(
            f"{measure} is evaluated on {amount(rows, 'held-out row')}. Below {FEW_HELD_OUT_ROWS} its values scatter by "
            "tenths: pass more rows, or a larger test_fraction=."
        )
