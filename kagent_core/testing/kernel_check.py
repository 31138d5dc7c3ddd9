"""One kernel against eager PyTorch: calls of its operator, in every layout, and what the kernel made of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kagent_core.capture.schemas import torch_dtype
from kagent_core.config import Config, ConfiguredKernels
from kagent_core.errors import CaptureError, CompilationError, KagentError, KernelExecutionError
from kagent_core.hooks import hookimpl
from kagent_core.kernels import UserKernel, activate
from kagent_core.registry.acceptance import refusal
from kagent_core.session import Session, session_for, use_plugin
from kagent_core.single import run_overload
from kagent_core.specs import DEFAULT_SIGNATURE, DType, KernelTask, OpCall
from kagent_core.testing.compare import TOLERANCES, MismatchError, assert_as_exact, assert_same, copy_arguments
from kagent_core.testing.edge_samples import at_edges
from kagent_core.testing.guarded_launches import GuardedLaunches
from kagent_core.testing.operator_samples import AS_IT_CAME, OperatorCall, operator_calls, variants

ALWAYS = (torch.float32, torch.float64, torch.int64)
"""Dtypes of the samples besides those that a kernel takes, so that what it leaves to others is told."""

WIDE = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)
"""Dtypes of the samples for a kernel that takes all of them."""


@dataclass(frozen=True)
class WrongResult:
    """A call that a kernel computes wrong.

    Attributes
    ----------
    call
        The call.
    error
        What differs from eager PyTorch, with the first wrong element.
    task
        What was launched: the packed arguments and the launch config.
    """

    call: OperatorCall
    error: MismatchError
    task: KernelTask


@dataclass
class KernelCheck:
    """What came of checking one kernel.

    Attributes
    ----------
    kernel
        The kernel.
    samples
        How many calls were tried: what the database has, and variants of it.
    taken, compacted
        How many the kernel computed, and for how many of them tensors were copied into another layout first.
    refused
        How many the kernel left to others, by reason.
    errors
        How many calls ended with an error where eager PyTorch has a result, by message.
    wrong
        The calls with a wrong result.
    broken
        Why the kernel cannot be used at all: it does not compile.
    base
        A call that the kernel computed, as the database has it: the one of most elements.
    """

    kernel: UserKernel
    samples: int = 0
    taken: int = 0
    compacted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[WrongResult] = field(default_factory=list)
    broken: KagentError | None = None
    base: OperatorCall | None = None

    @property
    def right(self) -> bool:
        """Whether the kernel computed something, and all of it as eager PyTorch does."""
        return self.taken > 0 and not self.wrong and self.broken is None


def check_kernel(
    kernel: UserKernel, config: Config, samples: int = 10, on_call: Callable[[OperatorCall], None] = lambda call: None
) -> KernelCheck:
    """Compare a kernel with eager PyTorch on calls of its operator, and look at the memory around what it writes.

    The samples of the database are small. A kernel that computes them right also gets calls of sizes around whole
    numbers of blocks.

    Parameters
    ----------
    kernel
        Need not be registered. Others that are must not outrank it.
    config
        Of the session that it runs in; its own ``kernels`` do not count.
    samples
        Most samples of torch's operator database per entry and dtype.
    on_call
        Called before every call.

    Raises
    ------
    KagentError
        When there are no samples of the operator, or the kernel is for several operators or for any.
    """
    if kernel.descriptor.fuses or kernel.descriptor.signature == DEFAULT_SIGNATURE:
        raise KagentError(
            f"{kernel!r} is no kernel for one operator, and only those have samples",
            hint="compare a program that calls the operators with eager PyTorch",
        )
    calls = operator_calls(kernel.descriptor.signature, _dtypes(kernel), samples)
    found = KernelCheck(kernel)
    with _alone(kernel, config) as checking:
        for call in itertools.chain.from_iterable(map(variants, calls)):
            on_call(call)
            try:
                checking.run(call, found)
            except CompilationError as error:
                found.broken = error
                break
        if found.right and found.base is not None:
            for call in at_edges(found.base):
                on_call(call)
                checking.run(call, found)
    return found


def without_kernels(config: Config, kernel: UserKernel) -> Config:
    """Return a config for a kernel's device that has no kernels of its own."""
    return config.replace(device=str(kernel.device), kernels=ConfiguredKernels())


def _dtypes(kernel: UserKernel) -> list[torch.dtype]:
    names = kernel.descriptor.dtypes
    own = WIDE if names is None else [torch_dtype(DType(name, 0)) for name in sorted(names)]
    return list(dict.fromkeys([*own, *ALWAYS]))


class _Recorder:
    """A plugin that notes what is launched."""

    def __init__(self) -> None:
        self.tasks: list[KernelTask] = []

    @hookimpl(wrapper=True)
    def kagent_assemble(self, ctx: Any) -> Generator[None, Sequence[KernelTask], Sequence[KernelTask]]:
        """Note the tasks of each extraction."""
        tasks = yield
        self.tasks += tasks
        return tasks


@contextlib.contextmanager
def _alone(kernel: UserKernel, config: Config) -> Iterator[_Checking]:
    recorder = _Recorder()
    with use_plugin(recorder, "check-kernel"), activate(kernel):
        session = session_for(without_kernels(config, kernel))
        guards = GuardedLaunches(session.executor_for(kernel.device).opened.runtime)
        with guards.watching():
            yield _Checking(kernel, session, recorder, guards)


class _Checking:
    """Runs calls with a kernel and compares them with eager PyTorch."""

    def __init__(self, kernel: UserKernel, session: Session, recorder: _Recorder, guards: GuardedLaunches) -> None:
        self._kernel = kernel.descriptor
        self._session = session
        self._recorder = recorder
        self._guards = guards
        self._planned: dict[Any, list[KernelTask]] = {}
        self._launched: list[KernelTask] = []

    def run(self, call: OperatorCall, found: KernelCheck) -> None:
        """Try one call, unless eager PyTorch refuses it, and count it."""
        args, kwargs = call.copied()
        try:
            with _quiet(), torch.no_grad():
                torch.manual_seed(0)
                want = call.overload(*args, **kwargs)
        except Exception:  # noqa: BLE001  such a call is none of the operator's
            return
        found.samples += 1
        given, by_name = call.copied()
        self._guards.overruns.clear()
        try:
            with _quiet(), _poisoned_memory():
                torch.manual_seed(0)
                got, tasks = self._run(call, given, by_name)
        except CompilationError:
            raise
        except CaptureError:
            found.samples -= 1  # kagent takes no such call, whatever the kernel
            return
        except KernelExecutionError as error:
            self._failed(call, error, found)
            return
        except KagentError as error:
            found.errors[_general(error.message.partition("\n")[0])] += 1
            return
        own = [task for task in tasks if _is(task, self._kernel)]
        if not own:
            found.refused[self._why(tasks)] += 1
            return
        found.taken += 1
        found.compacted += any(c.inserted is not None for task in tasks for c in task.calls)
        if call.variant == AS_IT_CAME and _numel(call) > (_numel(found.base) if found.base else 0):
            found.base = call
        try:
            if self._guards.overruns:
                raise MismatchError(self._guards.overruns[0])
            _compare(call, (got, (given, by_name)), (want, (args, kwargs)))
        except MismatchError as error:
            found.wrong.append(WrongResult(call, error, own[0]))

    def _failed(self, call: OperatorCall, error: KernelExecutionError, found: KernelCheck) -> None:
        """Count a call that ended with an error while it ran: it is wrong where the kernel was to compute it."""
        message = error.message.partition("\n")[0]
        own = [task for task in self._launched if _is(task, self._kernel)]
        if own:
            found.taken += 1
            found.wrong.append(WrongResult(call, MismatchError(message), own[0]))
        else:
            found.errors[_general(message)] += 1

    def _run(self, call: OperatorCall, args: Any, kwargs: Any) -> tuple[Any, list[KernelTask]]:
        """Run a call, and say what was launched: of a call that was planned before, what was launched then."""
        self._recorder.tasks = []
        key = (call.overload, *(_key(leaf) for leaf in pytree.tree_leaves((args, kwargs))))
        try:
            got = run_overload(self._session, call.overload, args, kwargs)
        finally:
            self._launched = self._planned.setdefault(key, self._recorder.tasks)
        return got, self._launched

    def _why(self, tasks: Sequence[KernelTask]) -> str:
        """Say why the kernel did not compute a call."""
        for each in (each for task in tasks for each in task.calls):
            if each.signature == self._kernel.signature:
                return _general(refusal(self._kernel, each) or _outranked(tasks, each))
        return "nothing is launched for such a call"


def _is(task: KernelTask, kernel: Any) -> bool:
    return (task.kernel.name, task.kernel.origin, task.kernel.source) == (kernel.name, kernel.origin, kernel.source)


def _outranked(tasks: Sequence[KernelTask], call: OpCall) -> str:
    names = [task.kernel.name for task in tasks if call in task.calls]
    return f"kernel '{names[0]}' came first" if names else "another kernel came first"


def _key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.is_conj(), leaf.is_neg())
    return (type(leaf), repr(leaf))


def _numel(call: OperatorCall) -> int:
    return max((tensor.numel() for tensor in call.tensors), default=0)


def _general(reason: str) -> str:
    """Leave the shapes out, so that equal reasons are counted together."""
    return re.sub(r", not (the \w+ tensor |the tensor )?[a-z]+\d+\[.*", "", reason)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what would be told of every sample: what is deprecated, what runs on the fallback device."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Let PyTorch fill new memory with NaN and large numbers, so that a result that is not written is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# -- comparing


def _compare(call: OperatorCall, got: Any, want: Any) -> None:
    """Raise MismatchError where results or arguments afterwards are not eager's, or memory around them changed."""
    for mine, theirs, what in zip(got, want, ("result", "arguments afterwards"), strict=True):
        try:
            assert_same(mine, theirs, what, every_stride=False)
        except MismatchError as error:
            if error.element is None:
                raise
            _compare_with_exact(call, mine, theirs, what, error)
    for mine, theirs in zip(pytree.tree_leaves(got[1]), pytree.tree_leaves(want[1]), strict=True):
        if isinstance(mine, torch.Tensor) and not _same_surroundings(mine, theirs):
            raise MismatchError("arguments afterwards: memory before or behind a tensor was written")


def _compare_with_exact(call: OperatorCall, got: Any, want: Any, what: str, error: MismatchError) -> None:
    """Raise MismatchError unless results that are not eager's are as near to float64's.

    An element that is float64's, rounded, is right: eager PyTorch itself may overflow on the way to it. Of the others,
    the error may be twice eager's own, three times for half types.
    """
    exact = _in_float64(call, what)
    if exact is None:
        raise error
    pairs = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(want), exact, strict=True))
    settled = [_settled(*each) for each in pairs]
    for (_, theirs, best), mine in zip(pairs, settled, strict=True):
        if not isinstance(theirs, torch.Tensor):
            continue
        half = theirs.dtype in (torch.float16, torch.bfloat16)
        try:
            if not _same_where_not_finite(mine, theirs):
                raise error
            assert_as_exact(mine.contiguous(), theirs.contiguous(), best.contiguous(), 3 if half else 2, what)
        except MismatchError:
            assert_same(settled, pytree.tree_leaves(want), what, every_stride=False)  # tells of what is truly wrong
            raise


def _in_float64(call: OperatorCall, what: str) -> list[Any] | None:
    """Return what a call gives in float64, flattened; None where the operator does not compute in it."""
    widened = call.with_tensors(lambda t: t.double() if t.is_floating_point() else t, "in float64")
    args, kwargs = widened.copied()
    try:
        with _quiet(), torch.no_grad():
            torch.manual_seed(0)
            results = call.overload(*args, **kwargs)
    except Exception:  # noqa: BLE001  then eager's own values count
        return None
    leaves = pytree.tree_leaves(results if what == "result" else (args, kwargs))
    floating = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return leaves if all(leaf.dtype is torch.float64 for leaf in floating) else None


def _settled(mine: Any, theirs: Any, best: Any) -> Any:
    """Return a result with eager's elements where it has those of float64."""
    if not isinstance(theirs, torch.Tensor) or theirs.dtype not in TOLERANCES:
        return mine
    rtol, atol = TOLERANCES[theirs.dtype]
    near = torch.isclose(mine.double(), best.to(theirs.dtype).double(), rtol=rtol, atol=atol, equal_nan=True)
    if bool(near.all()):
        return theirs
    twin = copy_arguments(mine)
    twin[near] = theirs[near]
    return twin


def _same_where_not_finite(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not theirs.is_floating_point():
        return torch.equal(mine, theirs)
    keep = ~theirs.isfinite()
    same = torch.equal(mine.isfinite(), theirs.isfinite())
    return same and torch.allclose(mine[keep], theirs[keep], equal_nan=True)


def _same_surroundings(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether the memory before and behind a tensor is as it was."""
    itemsize = theirs.element_size()
    sizes = zip(theirs.shape, theirs.stride(), strict=True)
    span = sum((size - 1) * stride for size, stride in sizes) + 1 if theirs.numel() else 0
    begin = theirs.storage_offset() * itemsize
    end = begin + span * itemsize
    one, other = (_bytes(t) for t in (mine, theirs))
    return torch.equal(one[:begin], other[:begin]) and torch.equal(one[end:], other[end:])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
