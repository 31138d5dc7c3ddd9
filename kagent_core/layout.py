"""Layout: the contract between a kernel and the memory layout of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kagent_core.specs import TensorSpec

__all__ = ["ANY_STRIDES", "CHANNELS_LAST", "CHANNELS_LAST_3D", "CONTIGUOUS", "Layout", "at_most"]

# Dimensions from the innermost to the outermost one, as PyTorch's memory formats have them.
_CHANNELS_LAST_ORDERS = {"channels-last": (1, 3, 2, 0), "channels-last 3d": (1, 4, 3, 2, 0)}


@dataclass(frozen=True, slots=True)
class _Contract:
    """Orders that must hold all at once, and the most dimensions that a tensor may have."""

    orders: frozenset[str] = frozenset()
    max_dims: int | None = None

    def holds(self, shape: Sequence[int], strides: Sequence[int]) -> bool:
        if self.max_dims is not None and len(shape) > self.max_dims:
            return False
        return all(_is_in_order(order, shape, strides) for order in self.orders)

    def covers(self, other: _Contract) -> bool:
        """Whether whatever the other one takes, this one takes too."""
        wide_enough = self.max_dims is None or (other.max_dims is not None and other.max_dims <= self.max_dims)
        return wide_enough and self.orders <= other.orders

    def __and__(self, other: _Contract) -> _Contract:
        limits = [limit for limit in (self.max_dims, other.max_dims) if limit is not None]
        return _Contract(self.orders | other.orders, min(limits, default=None))

    def __str__(self) -> str:
        ordered = " and ".join(sorted(self.orders))
        tensors = f"{ordered} tensors" if ordered else "tensors"
        if self.max_dims is not None:
            return f"{tensors} of at most {self.max_dims} dimensions"
        return tensors if ordered else "tensors of any strides"


@dataclass(frozen=True, slots=True)
class Layout:
    """What memory layouts a kernel takes for a tensor.

    Made from `CONTIGUOUS`, `CHANNELS_LAST`, `CHANNELS_LAST_3D`, `ANY_STRIDES` and `at_most`, combined with ``&`` (both
    must hold) and ``|`` (either does). As in PyTorch, dimensions of size 1 do not count. A tensor without elements
    is in every order, since it has nothing to lay out.

    Attributes
    ----------
    contracts
        One of them must hold.

    Examples
    --------
    >>> print(CONTIGUOUS & at_most(3) | CHANNELS_LAST)
    contiguous tensors of at most 3 dimensions or channels-last tensors
    >>> from kagent_core.specs import DType, TensorSpec
    >>> transposed = TensorSpec(DType("float32", 4), (2, 3), (1, 2), storage_offset=0, buffer=0)
    >>> CONTIGUOUS.takes(transposed), at_most(2).takes(transposed)
    (False, True)
    """

    contracts: tuple[_Contract, ...] = (_Contract(),)

    @property
    def takes_all(self) -> bool:
        """Whether it takes any tensor."""
        return self.contracts == (_Contract(),)

    def takes(self, spec: TensorSpec) -> bool:
        """Whether a tensor is laid out as asked."""
        return any(contract.holds(spec.shape, spec.strides) for contract in self.contracts)

    def __and__(self, other: Layout) -> Layout:
        return _simplified([mine & theirs for mine in self.contracts for theirs in other.contracts])

    def __or__(self, other: Layout) -> Layout:
        return _simplified([*self.contracts, *other.contracts])

    def __str__(self) -> str:
        return " or ".join(map(str, self.contracts))


def _simplified(contracts: Sequence[_Contract]) -> Layout:
    """Drop what another contract covers, so that equal layouts compare equal in most cases."""
    kept: list[_Contract] = []
    for contract in contracts:
        if not any(other.covers(contract) for other in kept):
            kept = [other for other in kept if not contract.covers(other)]
            kept.append(contract)
    return Layout(tuple(kept))


ANY_STRIDES = Layout()
"""Takes every tensor: the kernel is given its strides."""

CONTIGUOUS = Layout((_Contract(frozenset({"contiguous"})),))
"""Row-major order without gaps."""

CHANNELS_LAST = Layout((_Contract(frozenset({"channels-last"})),))
"""PyTorch's ``torch.channels_last``: four dimensions in the order N, H, W, C, without gaps."""

CHANNELS_LAST_3D = Layout((_Contract(frozenset({"channels-last 3d"})),))
"""PyTorch's ``torch.channels_last_3d``: five dimensions in the order N, D, H, W, C, without gaps."""


def at_most(dims: int) -> Layout:
    """Return the layout of tensors with at most that many dimensions, of any strides.

    Examples
    --------
    >>> print(at_most(2))
    tensors of at most 2 dimensions
    """
    if dims < 0:
        raise ValueError(f"a tensor cannot have at most {dims} dimensions")
    return Layout((_Contract(max_dims=dims),))


def _is_in_order(order: str, shape: Sequence[int], strides: Sequence[int]) -> bool:
    dims = _CHANNELS_LAST_ORDERS.get(order)
    if dims is None:
        dims = tuple(reversed(range(len(shape))))
    elif len(dims) != len(shape):
        return False
    if 0 in shape:
        return True
    expected = 1
    for dim in dims:
        if shape[dim] != 1:
            if strides[dim] != expected:
                return False
            expected *= shape[dim]
    return True
