"""Programs compared with eager PyTorch: results, arguments, and the memory around the arguments."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kagent_core.capture.schemas import resolve_overload
from kagent_core.testing.compare import assert_same, copy_arguments
from kagent_core.testing.conformance.case import Ran
from kagent_core.testing.conformance.opened import Opened, opened


def noise(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that are always the same for a seed."""
    return random.Random(seed).randbytes(nbytes)


def assert_bytes(got: bytes | bytearray, want: bytes, what: str) -> None:
    """Assert that bytes are equal, and name the first that differs."""
    if bytes(got) == want:
        return
    if len(got) != len(want):
        raise AssertionError(f"{what}: {len(got)} bytes, expected {len(want)}")
    first = next(i for i, (mine, theirs) in enumerate(zip(got, want, strict=True)) if mine != theirs)
    count = sum(mine != theirs for mine, theirs in zip(got, want, strict=True))
    raise AssertionError(
        f"{what}: {count} of {len(want)} bytes differ, the first at {first}: {got[first]:#04x}, "
        f"expected {want[first]:#04x}"
    )


def same(device: str, function: Callable[..., Any], *args: Any, calls: int = 2, **options: Any) -> Ran:
    """Run a function in eager PyTorch and on the device, and compare everything that a caller can see.

    Results are compared in values (zeros in their sign too), dtypes, shapes, strides and offsets; arguments likewise,
    for what is written in place; so is every byte of the arguments' storages that no argument covers; and which results
    are arguments or share their memory.

    Parameters
    ----------
    device
        The device.
    function, args
        What is run, and with what. Tensors keep their strides, offsets, and the memory that they share.
    calls
        How often: the first builds a plan, the others replay it.
    **options
        Config keys.
    """
    with opened(device, **options) as opening:
        torch._dynamo.reset()

        def called(*given: Any) -> Any:  # a function of its own: Dynamo keeps what it compiled with the function
            return function(*given)

        compiled = torch.compile(called, backend="kagent", options={"device": device, **options}, dynamic=False)
        for call in range(calls):
            compare_call(function, compiled, args, f"of call {call}")
        return opening.ran()


def compare_call(eager: Callable[..., Any], compiled: Callable[..., Any], args: Sequence[Any], what: str) -> None:
    """Call both on copies of the same arguments, and compare as `same` does."""
    mine, theirs = copy_together(args), copy_together(args)
    want = eager(*theirs)
    got = compiled(*mine)
    assert_same(got, want, f"result {what}", every_stride=False)
    assert_same(mine, theirs, f"arguments after {what.removeprefix('of ')}")
    assert_same_zeros(got, want, f"result {what}")
    assert_same_memory(mine, theirs, what)
    got_shares, want_shares = _shared(got, mine), _shared(want, theirs)
    assert got_shares == want_shares, f"result {what} shares memory with {got_shares}, eager's with {want_shares}"


def same_op(opening: Opened, signature: str, *args: Any, **kwargs: Any) -> None:
    """Run one operator in eager PyTorch and on the device, and compare."""
    import kagent_core

    overload = resolve_overload(signature)
    device = str(opening.device.device)
    for call in range(2):
        mine, theirs = copy_arguments(args), copy_arguments(args)
        what = f"{signature}{tuple(arg for arg in args if not isinstance(arg, torch.Tensor))}, call {call}"
        want = overload(*theirs, **kwargs)
        got = kagent_core.run_op(signature, *mine, device=device, **kwargs)
        assert_same(got, want, what, every_stride=False)
        assert_same_zeros(got, want, what)
        assert_same(mine, theirs, f"arguments of {what}")


def both_refuse(device: str, function: Callable[..., Any], *args: Any) -> str:
    """Assert that the device refuses what eager PyTorch refuses, and return how."""
    try:
        function(*copy_together(args))
    except Exception as error:  # noqa: BLE001  whatever eager raises
        eagers = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        raise AssertionError("eager PyTorch does not refuse it: the case is wrong")
    with opened(device):
        torch._dynamo.reset()

        def called(*given: Any) -> Any:
            return function(*given)

        compiled = torch.compile(called, backend="kagent", options={"device": device}, dynamic=False)
        try:
            given = compiled(*copy_together(args))
        except Exception as error:  # noqa: BLE001  whatever it raises is looked at
            assert str(error).strip(), f"{type(error).__name__} without a message"
            return f"{type(error).__name__}: {error}".splitlines()[0]
    raise AssertionError(f"it gave {given}, where eager PyTorch raises {eagers}")


def copy_together(args: Sequence[Any]) -> tuple[Any, ...]:
    """Copy arguments so that those which share memory go on sharing it, and one that is given twice stays one.

    A view stays a view of a tensor that has all the memory; what is no view becomes none.
    """
    storages: dict[int, Any] = {}
    bases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    twins: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in twins:
            key = leaf.untyped_storage()._cdata
            if key not in storages:
                storages[key] = leaf.untyped_storage().clone()
            if leaf._base is None:
                twin = torch.empty(0, dtype=leaf.dtype)
                twins[id(leaf)] = twin.set_(storages[key], leaf.storage_offset(), leaf.shape, leaf.stride())
                return twins[id(leaf)]
            count = storages[key].nbytes() // leaf.element_size()
            empty = torch.empty(0, dtype=leaf.dtype)
            whole = bases.setdefault((key, leaf.dtype), empty.set_(storages[key], 0, (count,), (1,)))
            twins[id(leaf)] = whole.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return twins[id(leaf)]

    copied: tuple[Any, ...] = pytree.tree_map(copy, tuple(args))
    return copied


def assert_same_zeros(got: Any, want: Any, what: str) -> None:
    """Assert that floating-point zeros have the same sign."""
    for mine, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        if isinstance(theirs, torch.Tensor) and theirs.is_floating_point():
            wrong = (theirs == 0) & (torch.signbit(mine) != torch.signbit(theirs))
            assert not wrong.any(), f"{what}: {int(wrong.sum())} zeros have another sign than eager's"


def assert_same_memory(mine: Any, theirs: Any, what: str) -> None:
    """Assert that the bytes of the arguments' storages which no argument covers are as eager PyTorch leaves them."""
    covered: dict[int, torch.Tensor] = {}
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for got, want in zip(pytree.tree_leaves(mine), pytree.tree_leaves(theirs), strict=True):
        if not isinstance(want, torch.Tensor) or want.untyped_storage().nbytes() == 0:
            continue
        key = want.untyped_storage()._cdata
        pairs[key] = _all_bytes(got), _all_bytes(want)
        covered.setdefault(key, torch.zeros_like(pairs[key][1], dtype=torch.bool))
        positions = torch.arange(covered[key].numel() // want.element_size()).as_strided(
            want.shape, want.stride(), want.storage_offset()
        )
        covered[key].view(-1, want.element_size())[positions.reshape(-1)] = True
    for key, (got, want) in pairs.items():
        wrong = (got != want) & ~covered[key]
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise AssertionError(
                f"memory beside an argument was written in the run {what}: {int(wrong.sum())} bytes, the first at byte "
                f"{first} of a storage of {want.numel()}"
            )


def _all_bytes(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))


def _shared(results: Any, args: Any) -> list[tuple[str, ...]]:
    """For each result, what it is or shares memory with: ``is argument 0``, ``shares argument 1``, ``is result 0``."""
    arguments = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    tensors = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    told = []
    for position, tensor in enumerate(tensors):
        others = [(f"argument {i}", other) for i, other in enumerate(arguments)]
        others += [(f"result {i}", other) for i, other in enumerate(tensors[:position])]
        told.append(
            tuple(
                f"{'is' if tensor is other else 'shares'} {name}"
                for name, other in others
                if tensor is other
                or (tensor.numel() and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
            )
        )
    return told
