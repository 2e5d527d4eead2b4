"""What several files of tests/reporting use."""

from __future__ import annotations

from typing import Any

import numpy as np


def bands(fig: Any) -> list[Any]:
    return [trace for trace in fig.data if trace.fill == "toself"]


def line_of(fig: Any, name: str) -> Any:
    [trace] = [trace for trace in fig.data if trace.name == name]
    return trace


def assert_whiskers(bar: Any, values: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(values) + bar.array, high, rtol=1e-12)
    np.testing.assert_allclose(np.array(values) - bar.arrayminus, low, rtol=1e-12)
    assert bar.symmetric is False


def texts(low: np.ndarray, high: np.ndarray, digits: str = ".4f") -> list[str]:
    return [f" ({a:{digits}} to {b:{digits}})" for a, b in zip(low.ravel(), high.ravel(), strict=True)]
