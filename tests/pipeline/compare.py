"""Comparing a compiled function with eager PyTorch in everything that a caller can see."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils import _pytree as pytree


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


TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}
"""Relative and absolute ones of ``torch.testing.assert_close``, the narrowest types last."""


def assert_same(
    got: Any, want: Any, what: str = "", every_stride: bool = True, made_from: Collection[torch.dtype] = ()
) -> None:
    """Assert that values, dtypes, shapes, strides, offsets and need of a gradient are equal, all through.

    With `every_stride` false, only `telling_strides` count. A floating-point number is as exact as the narrowest of the
    types that it is `made_from`: a float64 may hold a float32's value.
    """
    got_leaves, got_tree = pytree.tree_flatten(got)
    want_leaves, want_tree = pytree.tree_flatten(want)
    assert got_tree == want_tree, f"{what}: structure {got_tree} is not eager's {want_tree}"
    for position, (mine, theirs) in enumerate(zip(got_leaves, want_leaves, strict=True)):
        where = f"{what} [{position}]"
        if isinstance(theirs, float):  # taken from a tensor, with that tensor's tolerance
            assert type(mine) is float, f"{where}: {mine} is not eager's {theirs}"
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), equal_nan=True)
            continue
        if not isinstance(theirs, torch.Tensor):
            assert mine == theirs, f"{where}: {mine} is not eager's {theirs}"
            continue
        for attribute in ("dtype", "shape", "requires_grad"):
            assert getattr(mine, attribute) == getattr(theirs, attribute), f"{where}: {attribute} differs from eager's"
        strides = torch.Tensor.stride if every_stride else telling_strides
        assert strides(mine) == strides(theirs), f"{where}: strides {mine.stride()}, eager's {theirs.stride()}"
        assert mine.storage_offset() == theirs.storage_offset(), f"{where}: storage offset differs from eager's"
        assert (mine.is_conj(), mine.is_neg()) == (theirs.is_conj(), theirs.is_neg()), f"{where}: lazy bits differ"
        closeness: dict[str, float] = {}
        if made_from and theirs.dtype in TOLERANCES:
            found = [limits for dtype, limits in TOLERANCES.items() if dtype in (theirs.dtype, *made_from)]
            closeness = {"rtol": max(rtol for rtol, _ in found), "atol": max(atol for _, atol in found)}
        torch.testing.assert_close(
            mine, theirs, equal_nan=True, msg=lambda text, where=where: f"{where}: {text}", **closeness
        )


ALIKE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Root mean square of the difference that many operators in another order of additions may make, relative to values."""


def assert_alike(got: Any, want: Any, what: str) -> None:
    """Assert what `assert_same` does, but of floating-point values on the whole: for what many operators have made."""
    for position, (mine, theirs) in enumerate(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)):
        where = f"{what} [{position}]"
        if not isinstance(theirs, torch.Tensor) or theirs.dtype not in ALIKE:
            assert_same(mine, theirs, where)
            continue
        for attribute in ("dtype", "shape", "requires_grad"):
            assert getattr(mine, attribute) == getattr(theirs, attribute), f"{where}: {attribute} differs from eager's"
        assert telling_strides(mine) == telling_strides(theirs), f"{where}: strides differ from eager's"
        assert torch.equal(mine.isfinite(), theirs.isfinite()), f"{where}: infinities and NaN elsewhere than in eager"
        difference, size = rms(mine - theirs), rms(theirs)
        assert difference <= ALIKE[theirs.dtype] * size, f"{where}: differs by {difference:.3g}, values are {size:.3g}"


def rms(values: torch.Tensor) -> float:
    """Return the root mean square of the finite values; 0 for none."""
    finite = values.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def assert_as_exact(got: Any, want: Any, exact: Any, times: float, what: str) -> None:
    """Assert that errors against values in float64 are at most some times eager's own, and a unit in the last place."""
    for mine, theirs, best in zip(*map(pytree.tree_leaves, (got, want, exact)), strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), what
        if not mine.is_floating_point():
            assert torch.equal(mine, theirs), f"{what}: differs from eager's"
            continue
        error, eagers = rms(mine - best), rms(theirs - best)
        allowed = times * eagers + torch.finfo(mine.dtype).eps * rms(best)
        assert error <= allowed, f"{what}: an error of {error:.3g}, eager's is {eagers:.3g}"


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
    """
    torch._dynamo.reset()
    options = {"device": device, **options}
    compiled = torch.compile(lambda *a: function(*a), backend="kagent", options=options, dynamic=dynamic)
    for call in range(calls):
        mine, theirs = copy_arguments(args), copy_arguments(args)
        torch.manual_seed(call)
        want = function(*theirs)
        torch.manual_seed(call)
        got = compiled(*mine)
        assert_same(got, want, f"result of call {call}", every_stride)
        assert_same(mine, theirs, f"arguments after call {call}")
