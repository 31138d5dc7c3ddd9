"""Comparing results with eager PyTorch's in everything that a caller can see."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}
"""Relative and absolute ones of ``torch.testing.assert_close``, the narrowest types last."""

ALIKE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Root mean square of the difference that many operators in another order of additions may make, relative to values."""


@dataclass(frozen=True)
class WrongElement:
    """The first element, in row-major order, that differs.

    Attributes
    ----------
    index
        Where in the tensor; empty for a tensor of no dimensions.
    got, want
        The values, as text.
    count, total
        How many elements differ, and how many there are.
    """

    index: tuple[int, ...]
    got: str
    want: str
    count: int
    total: int

    def __str__(self) -> str:
        place = f"at [{', '.join(map(str, self.index))}]" if self.index else "of 0 dimensions"
        return f"{self.count} of {self.total} elements differ, the first {place}: {self.got}, expected {self.want}"


class MismatchError(AssertionError):
    """A result differs from what was expected.

    Attributes
    ----------
    element
        The first wrong element, where values differ; None where something else does.
    """

    def __init__(self, message: str, element: WrongElement | None = None) -> None:
        super().__init__(message)
        self.element = element


def copy_arguments(args: Any) -> Any:
    """Copy every tensor with its strides, offset, gaps, lazy bits and need of a gradient."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        storage = leaf.untyped_storage().clone()
        twin = torch.empty(0, dtype=leaf.dtype).set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())
        if leaf.is_conj():
            twin = torch._conj(twin)
        if leaf.is_neg():
            twin = torch._neg_view(twin)
        return twin.requires_grad_(leaf.requires_grad)

    return pytree.tree_map(copy, args)


def telling_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides without those that lay nothing out: of dimensions of size 1, of tensors without elements.

    There PyTorch's meta kernels, which capture asks, do not always agree with its real ones.
    """
    if tensor.numel() == 0:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def assert_same(
    got: Any, want: Any, what: str = "", every_stride: bool = True, made_from: Collection[torch.dtype] = ()
) -> None:
    """Assert that values, dtypes, shapes, strides, offsets and need of a gradient are equal, all through.

    Parameters
    ----------
    got, want
        Tensors and numbers, in any structure of tuples, lists and dicts.
    what
        What is compared, for the message.
    every_stride
        Whether all strides count; else only `telling_strides` do.
    made_from
        A floating-point number is as exact as the narrowest of the types that it is made from: a float64 may hold a
        float32's value.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    got_leaves, got_tree = pytree.tree_flatten(got)
    want_leaves, want_tree = pytree.tree_flatten(want)
    if got_tree != want_tree:
        _differ(what, f"structure {got_tree} is not eager's {want_tree}")
    for position, (mine, theirs) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        where = f"{what} [{position}]"
        if isinstance(theirs, float):  # taken from a tensor, with that tensor's tolerance
            if type(mine) is not float:
                _differ(where, f"{mine!r} is not eager's {theirs!r}")
            _assert_close(torch.tensor(mine), torch.tensor(theirs), where)
        elif not isinstance(theirs, torch.Tensor):
            if mine != theirs:
                _differ(where, f"{mine!r} is not eager's {theirs!r}")
        else:
            _assert_same_tensor(mine, theirs, where, every_stride, made_from)


def _assert_same_tensor(
    mine: Any, theirs: torch.Tensor, where: str, every_stride: bool, made_from: Collection[torch.dtype]
) -> None:
    _assert_same_kind(mine, theirs, where)
    strides = torch.Tensor.stride if every_stride else telling_strides
    if strides(mine) != strides(theirs):
        _differ(where, f"strides {mine.stride()} are not eager's {theirs.stride()}")
    # of a tensor without elements, strides and so offsets come out of nothing that counts
    if mine.storage_offset() != theirs.storage_offset() and (every_stride or theirs.numel()):
        _differ(where, f"storage offset {mine.storage_offset()} is not eager's {theirs.storage_offset()}")
    if (mine.is_conj(), mine.is_neg()) != (theirs.is_conj(), theirs.is_neg()):
        _differ(where, "lazy conjugation or negation is not as eager's")
    closeness: tuple[float, float] | None = None
    if made_from and theirs.dtype in TOLERANCES:
        found = [limits for dtype, limits in TOLERANCES.items() if dtype in (theirs.dtype, *made_from)]
        closeness = max(rtol for rtol, _ in found), max(atol for _, atol in found)
    _assert_close(mine, theirs, where, closeness)


def _assert_same_kind(mine: Any, theirs: torch.Tensor, where: str) -> None:
    if not isinstance(mine, torch.Tensor):
        _differ(where, f"{type(mine).__name__} {mine!r} is not a tensor, as eager's is")
    for attribute in ("dtype", "shape", "requires_grad"):
        got, want = getattr(mine, attribute), getattr(theirs, attribute)
        if got != want:
            _differ(where, f"{attribute} {got} is not eager's {want}")


def _assert_close(
    mine: torch.Tensor, theirs: torch.Tensor, where: str, closeness: tuple[float, float] | None = None
) -> None:
    rtol, atol = closeness or (None, None)
    try:
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        element = first_wrong_element(mine, theirs, rtol, atol)
        raise MismatchError(f"{where}: {element if element is not None else error}", element) from None


def first_wrong_element(
    got: torch.Tensor, want: torch.Tensor, rtol: float | None = None, atol: float | None = None
) -> WrongElement | None:
    """Return the first element that is not close, or None where all are or the tensors cannot be compared.

    Parameters
    ----------
    got, want
        Tensors of one dtype and shape.
    rtol, atol
        Tolerances; by default the ones of the dtype.
    """
    if got.layout is not torch.strided or got.is_quantized:
        return None
    if rtol is None or atol is None:
        rtol, atol = TOLERANCES.get(_real_dtype(want.dtype), (0.0, 0.0))
    mine, theirs = got.detach(), want.detach()
    if want.dtype in TOLERANCES:
        mine, theirs = mine.double(), theirs.double()
    wrong = ~torch.isclose(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
    count = int(wrong.sum())
    if count == 0:
        return None
    index = tuple(int(part) for part in wrong.nonzero()[0])
    return WrongElement(index, str(got.detach()[index].item()), str(want.detach()[index].item()), count, want.numel())


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def assert_alike(got: Any, want: Any, what: str) -> None:
    """Assert what `assert_same` does, but of floating-point values on the whole: for what many operators have made.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    for position, (mine, theirs) in enumerate(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)):
        where = f"{what} [{position}]"
        if not isinstance(theirs, torch.Tensor) or theirs.dtype not in ALIKE:
            assert_same(mine, theirs, where)
            continue
        _assert_same_kind(mine, theirs, where)
        if telling_strides(mine) != telling_strides(theirs):
            _differ(where, f"strides {mine.stride()} are not eager's {theirs.stride()}")
        if not torch.equal(mine.isfinite(), theirs.isfinite()):
            _differ(where, "infinities and NaN are elsewhere than in eager")
        difference, size = rms(mine - theirs), rms(theirs)
        if not difference <= ALIKE[theirs.dtype] * size:
            _differ(where, f"values differ by {difference:.3g} (root mean square), they are {size:.3g}")


def rms(values: torch.Tensor) -> float:
    """Return the root mean square of the finite values; 0 for none."""
    finite = values.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def assert_as_exact(got: Any, want: Any, exact: Any, times: float, what: str) -> None:
    """Assert that errors against values in float64 are at most some times eager's own, and a unit in the last place.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    for mine, theirs, best in zip(*map(pytree.tree_leaves, (got, want, exact)), strict=True):
        if (mine.dtype, mine.shape, mine.stride()) != (theirs.dtype, theirs.shape, theirs.stride()):
            _differ(what, "dtype, shape or strides are not eager's")
        if not mine.is_floating_point():
            if not torch.equal(mine, theirs):
                _differ(what, "values are not eager's")
            continue
        for test in (torch.isnan, torch.isposinf, torch.isneginf):
            if not torch.equal(test(mine), test(theirs)):
                _differ(what, "infinities and NaN are elsewhere than in eager")
        error, eagers = rms(mine - best), rms(theirs - best)
        if not error <= times * eagers + torch.finfo(mine.dtype).eps * rms(best):
            _differ(what, f"an error of {error:.3g} against float64, eager's is {eagers:.3g}")


def check_against_eager(
    function: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    dynamic: bool | None = None,
    calls: int = 2,
    every_stride: bool = True,
    **options: Any,
) -> None:
    """Run a function in eager PyTorch and through kagent on copies of `args`; compare results and arguments.

    Runs `calls` times, so that both the first call and a replay are compared. `options` are config keys.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    torch._dynamo.reset()
    options = {"device": device, **options}

    def called(*given: Any) -> Any:  # a function of its own: Dynamo keeps what it compiled with the function
        return function(*given)

    compiled = torch.compile(called, backend="kagent", options=options, dynamic=dynamic)
    for call in range(calls):
        mine, theirs = copy_arguments(args), copy_arguments(args)
        torch.manual_seed(call)
        want = function(*theirs)
        torch.manual_seed(call)
        got = compiled(*mine)
        assert_same(got, want, f"result of call {call}", every_stride)
        assert_same(mine, theirs, f"arguments after call {call}")


def _differ(where: str, how: str) -> NoReturn:
    raise MismatchError(f"{where}: {how}" if where else how)
