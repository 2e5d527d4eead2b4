"""Numbers within bounds, as types of settings and arguments: `typed` checks them and names the bound in the error.

`PositiveInt`, `NonNegativeInt`, `TwoOrMore`, `Bins`, `RowCount`, `Seed`, `PermutationCount`, `PositiveFloat`,
`NonNegativeFloat`, `Limit`, `Fraction`, `Probability`, `OpenFraction`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from .argument_checks import without_mounted_save

with without_mounted_save():
    from beartype.vale import Is


@dataclass(frozen=True)
class _Within:
    """A bound, whose `repr` is its wording in errors. A bool is no number, NaN is within no bound."""

    words: str
    holds: Callable[[float], bool]

    def __call__(self, value: float) -> bool:
        return not isinstance(value, bool) and self.holds(value)

    def __repr__(self) -> str:
        return self.words


PositiveInt = Annotated[int, Is[_Within("an int of 1 or more", lambda n: 1 <= n < 2**63)]]
NonNegativeInt = Annotated[int, Is[_Within("an int of 0 or more", lambda n: 0 <= n < 2**63)]]
TwoOrMore = Annotated[int, Is[_Within("an int of 2 or more", lambda n: 2 <= n < 2**63)]]
Bins = Annotated[int, Is[_Within("an int from 2 to 100,000", lambda n: 2 <= n <= 100_000)]]
RowCount = Annotated[int, Is[_Within("an int from 1 to 2^20", lambda n: 1 <= n <= 2**20)]]
Seed = Annotated[int, Is[_Within("an int from 0 to 2^31 - 1", lambda n: 0 <= n < 2**31)]]
# With fewer than 19 permutations, no p-value can be 0.05 or less.
PermutationCount = Annotated[int, Is[_Within("0 for no null, or an int of 19 or more", lambda n: n == 0 or 19 <= n < 2**63)]]
PositiveFloat = Annotated[int | float, Is[_Within("a finite float above 0", lambda x: 0 < x < math.inf)]]
NonNegativeFloat = Annotated[int | float, Is[_Within("a finite float of 0 or more", lambda x: 0 <= x < math.inf)]]
Limit = Annotated[int | float, Is[_Within("a float above 0, infinite for no limit", lambda x: x > 0)]]
Fraction = Annotated[int | float, Is[_Within("a float above 0 and at most 1", lambda x: 0 < x <= 1)]]
Probability = Annotated[int | float, Is[_Within("a float from 0 to 1", lambda x: 0 <= x <= 1)]]
OpenFraction = Annotated[int | float, Is[_Within("a float above 0 and below 1", lambda x: 0 < x < 1)]]
