"""Hash of integers: the finaliser of SplitMix64 (Steele, Lea and Flood 2014).

A plain function of torch: it is serialised by value and runs on servers too.
"""

from __future__ import annotations

from torch import Tensor


def mixed(values: Tensor) -> Tensor:
    """Hash each integer (the finaliser of SplitMix64).

    Args:
        values: int64.

    Examples:
        >>> import torch
        >>> mixed(torch.tensor([0, 1, 2])).tolist()
        [0, 6238072747940578789, -2606959012126976886]
    """
    # A right shift of a signed integer repeats its sign; the mask clears these bits. Products wrap around at 2^64.
    values = (values ^ ((values >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    values = (values ^ ((values >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return values ^ ((values >> 31) & 0x1FFFFFFFF)
