"""Level 2: every operator of torch's own operator database gives what eager PyTorch gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kagent_core.testing.compare import MismatchError, telling_strides
from kagent_core.testing.conformance.case import CannotRunError, Case, Ran, Target
from kagent_core.testing.conformance.database import (
    EXCEPTIONS,
    GRADIENTS_LAID_OUT_OTHERWISE,
    NEEDS_GPU,
    NOT_CAPTURED,
    copied,
    database_entries,
    dtypes_of,
    everything_captured,
    full_name,
    samples,
)
from kagent_core.testing.conformance.families import OTHER, family_of
from kagent_core.testing.conformance.overloads import overload_cases
from kagent_core.testing.conformance.reproduction import operator_script
from kagent_core.testing.conformance.running import OnDevice, assert_right, quiet, widened

LEVEL = 2
CALLS = 2
"""The first call builds a plan, the second replays it."""
FULL_SAMPLES = 4
"""Samples of each dtype, where more than one is tried."""

DATABASE = "torch's operator database"
IMPORT = "import torch.testing._internal.common_methods_invocations\n"

Function = Callable[[Any, Any, Any], Any]
Sample = tuple[Any, Any, Any]
Run = Callable[[Function, Any], tuple[Any, torch.Tensor]]


@dataclass(frozen=True)
class Trial:
    """One sample of an entry.

    Attributes
    ----------
    dtype
        Of the sample's tensors.
    position
        Among the samples of that dtype.
    gradients
        Whether the gradients of the arguments are compared as well.
    """

    dtype: torch.dtype
    position: int = 0
    gradients: bool = False

    def __str__(self) -> str:
        told = f"sample {self.position} of {str(self.dtype).removeprefix('torch.')}"
        return f"{told}, with gradients" if self.gradients else told


def cases(target: Target) -> list[Case]:
    """Return a case for each entry of torch's operator database, and for each of core ATen's overloads.

    Where the database is missing, a case that cannot run says so.
    """
    try:
        entries = [operator_case(entry) for entry in database_entries()]
    except CannotRunError as error:
        entries = [Case(LEVEL, DATABASE, OTHER, functools.partial(_cannot_run, error), lambda target: IMPORT)]
    return [*entries, *overload_cases()]


def _cannot_run(error: CannotRunError, target: Target) -> Ran:
    raise error


def operator_case(entry: Any) -> Case:
    """Return the case of one entry."""
    name = full_name(entry)
    return Case(LEVEL, name, family_of(name), functools.partial(_check_entry, entry), functools.partial(_script, entry))


def trials(entry: Any, full: bool) -> Iterator[Trial]:
    """Yield what an entry is tried with: one sample, or several of each dtype and the gradients of one."""
    dtypes = dtypes_of(entry)
    if not full:
        yield Trial(dtypes[0])
        return
    for dtype in dtypes:
        yield from (Trial(dtype, position) for position in range(len(samples(entry, dtype, FULL_SAMPLES))))
    name = full_name(entry)
    if entry.supports_autograd and dtypes[0].is_floating_point and name not in NOT_CAPTURED.keys() | EXCEPTIONS.keys():
        yield Trial(dtypes[0], gradients=True)


def plain(entry: Any) -> Function:
    """The operator as a function of a sample: its results go to the caller."""
    operator = entry.op
    return lambda first, args, kwargs: operator(first, *args, **kwargs)


def seeded(function: Function, sample: Sample) -> tuple[Any, torch.Tensor]:
    """Call with a fixed seed; return the result and the generator's state afterwards."""
    torch.manual_seed(1)
    result = function(*sample)
    return result, torch.get_rng_state()


def seeded_with_gradients(
    name: str, process: Callable[[Any], Any], function: Function, sample: Sample
) -> tuple[Any, torch.Tensor]:
    """As `seeded`, with the gradients of all arguments, for random gradients of the results.

    `process` makes of the results what has a gradient: not the phase of an eigenvector, say.
    """
    result, state = seeded(function, sample)
    arguments, results = differentiable(sample), differentiable(process(result))
    given = [_drawn_like(leaf) for leaf in results]
    found: tuple[torch.Tensor | None, ...] = ()
    if results:
        found = torch.autograd.grad(results, arguments, given, allow_unused=True)
    if name in GRADIENTS_LAID_OUT_OTHERWISE:
        found = tuple(None if gradient is None else gradient.contiguous() for gradient in found)
    return (result, found), state


def _drawn_like(leaf: torch.Tensor) -> torch.Tensor:
    """Random numbers that are the same for every precision."""
    narrow = leaf.to(torch.complex64 if leaf.is_complex() else torch.float32)
    return torch.randn_like(narrow).to(leaf.dtype)


def differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors that need a gradient."""
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


# -- one entry


class _RefusedError(Exception):
    """Eager PyTorch does not take a sample."""


def _check_entry(entry: Any, target: Target) -> Ran:
    if EXCEPTIONS.get(full_name(entry)) == NEEDS_GPU:
        raise CannotRunError(NEEDS_GPU)
    device, refused, count = OnDevice(target), "", 0
    fallbacks: dict[str, str] = {}
    with quiet(), everything_captured():
        for trial in trials(entry, target.full):
            with device.watched():
                try:
                    check_trial(entry, trial, device)
                    count += 1
                except _RefusedError as error:
                    refused = str(error)
                fallbacks |= dict(device.fallbacks())
    if not count:
        raise CannotRunError(f"eager PyTorch does not take it: {refused}")
    return Ran(tuple(sorted(fallbacks.items())), f"{count} samples" if target.full else "")


def check_trial(entry: Any, trial: Trial, device: OnDevice) -> None:
    """Compare one sample of an entry with eager PyTorch.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    try:
        _compare(entry, trial, device)
    except MismatchError as error:
        raise MismatchError(f"{trial}: {error}", error.element) from None
    except (_RefusedError, CannotRunError):
        raise
    except Exception as error:
        error.add_note(f"with {trial}")
        raise


def _compare(entry: Any, trial: Trial, device: OnDevice) -> None:
    name, function = full_name(entry), plain(entry)
    sample = samples(entry, trial.dtype, trial.position + 1, trial.gradients)[trial.position]
    run: Run = seeded
    if trial.gradients:
        run = functools.partial(seeded_with_gradients, name, sample.output_process_fn_grad)
    given = (sample.input, sample.args, sample.kwargs)
    theirs = copied(given)
    try:
        want, want_state = run(function, theirs)
    except Exception as error:
        raise _RefusedError(f"{type(error).__name__}: {error}") from error

    @functools.cache
    def exact() -> tuple[Any, Any]:
        wide = widened(copied(given))
        return run(function, wide)[0], wide

    for call, (ours, got, got_state) in enumerate(_calls(name, function, given, run, device)):
        what = "result and gradients" if trial.gradients else "result"
        assert_right(ours, theirs, f"arguments after call {call}", lambda: exact()[1], every_stride=device.host_memory)
        if not torch.equal(got_state, want_state):
            raise MismatchError(f"after call {call} the random number generator is in another state than after eager's")
        if name in EXCEPTIONS:
            _assert_geometry(got, want, device.host_memory)
        else:
            assert_right(got, want, f"{what} of call {call}", lambda: exact()[0], every_stride=device.host_memory)


def _calls(
    name: str, function: Function, given: Sample, run: Run, device: OnDevice
) -> Iterator[tuple[Sample, Any, torch.Tensor]]:
    """Call an operator through kagent; yield its arguments afterwards, its result, and the generator's state.

    What torch.compile leaves to eager PyTorch, or fails at whatever the backend, goes operator by operator.
    """

    def called(compiled: Function) -> tuple[Sample, Any, torch.Tensor]:
        ours = copied(given)
        return (ours, *run(compiled, ours))

    if name not in NOT_CAPTURED:
        compiled, first = device.compiled(function), None
        try:
            first = called(compiled)
        except Exception:
            if _is_captured(function, copied(given)):
                raise
        if first is not None and device.graphs:
            yield first
            yield from (called(compiled) for _ in range(CALLS - 1))
            return
        if differentiable(given):
            raise _RefusedError("torch.compile does not capture it, so that it has no gradients")
    for _ in range(CALLS):
        yield called(device.one_by_one(function))
        if not device.operators:
            raise CannotRunError("no operator of it reaches kagent")


def _is_captured(function: Function, sample: Sample) -> bool:
    """Whether torch.compile captures a function with a backend that runs what eager PyTorch runs."""
    torch._dynamo.reset()
    try:
        torch.compile(function, backend="aot_eager")(*sample)
    except Exception:  # noqa: BLE001 - whatever it is, it is torch's
        return False
    return True


def _assert_geometry(got: Any, want: Any, every_stride: bool) -> None:
    mine, theirs = geometry(got, every_stride), geometry(want, every_stride)
    if mine != theirs:
        raise MismatchError(f"dtypes, shapes and strides {mine} are not eager's {theirs}")


def geometry(result: Any, every_stride: bool = True) -> list[Any]:
    """Return dtype, shape and strides of every tensor: all strides, or the telling ones."""
    strides = torch.Tensor.stride if every_stride else telling_strides
    return [(leaf.dtype, tuple(leaf.shape), strides(leaf)) for leaf in pytree.tree_leaves(result)]


def _script(entry: Any, target: Target) -> str:
    """Return a script for the first trial that fails; for the first one where none does."""
    with quiet():
        tried = list(trials(entry, target.full))
    found = tried[0] if len(tried) == 1 else next((trial for trial in tried if _fails(entry, trial, target)), tried[0])
    every_stride = OnDevice(target).host_memory
    return operator_script(entry, found.dtype, found.position, found.gradients, target, every_stride)


def _fails(entry: Any, trial: Trial, target: Target) -> bool:
    device = OnDevice(target)
    try:
        with device.watched(), everything_captured():
            check_trial(entry, trial, device)
    except (_RefusedError, CannotRunError):
        return False
    except Exception:  # noqa: BLE001 - whatever it is, the script is to show it
        return True
    return False
