"""Functions on the device under test, what became of them, and whether it is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kagent_core.backend import kagent
from kagent_core.capture.schemas import signature_of
from kagent_core.config import load_config
from kagent_core.session import Session, session_for
from kagent_core.single import SingleOperators, run_overload
from kagent_core.testing.compare import MismatchError, assert_as_exact, assert_same, telling_strides
from kagent_core.testing.conformance.case import Target
from kagent_core.testing.conformance.database import dense

UNPLANNED = "what it returns is known only when it has run"
SHARED = "its arguments share memory"


class _NotedOperators(SingleOperators):
    """Single operators, with a note of those for which no plan was made: those ran on the fallback device."""

    def __init__(self, host_memory: bool) -> None:
        super().__init__()
        self.count = 0
        self.unplanned: dict[str, str] = {}
        self._host_memory = host_memory
        self._planned: set[str] = set()

    def run(self, session: Session, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.count += 1
        call, before = _described(overload, args, kwargs), _latest_report(session)
        result = super().run(session, overload, args, kwargs)
        if _latest_report(session) is not before:
            self._planned.add(call)
        elif call not in self._planned and not self._host_memory:
            self.unplanned[signature_of(overload)] = UNPLANNED
        return result


def _latest_report(session: Session) -> Any:
    return session.reports[-1] if session.reports else None


def _described(overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    def described(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        return leaf.dtype, tuple(leaf.shape), strides

    return repr((overload, pytree.tree_map(described, (tuple(args), dict(kwargs)))))


class OperatorByOperator(TorchDispatchMode):
    """Takes each ATen operator that eager PyTorch dispatches through a session's pipeline."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session
        self.elsewhere: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        single = self.session.single
        before = single.count if isinstance(single, _NotedOperators) else 0
        result = run_overload(self.session, func, args, kwargs or {})
        if isinstance(single, _NotedOperators) and single.count == before:
            self.elsewhere[signature_of(func)] = SHARED
        return result


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what torch warns of: what it deprecates is tried as well, and numbers that mean nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


class OnDevice:
    """The device under test for one case: what is compiled for it, and what became of that.

    Parameters
    ----------
    target
        The device.
    **options
        Config keys beside the device.

    Attributes
    ----------
    graphs
        How many of Dynamo's graphs have reached kagent.
    host_memory
        Whether the device's memory is the host's, so that results have all of eager's strides.
    """

    def __init__(self, target: Target, **options: Any) -> None:
        # a device's own random numbers could not be compared
        self.options = {"device": target.device, "logs": "error", "random_numbers": "eager", **options}
        self.session = session_for(load_config(options=self.options))
        self.host_memory = self.session.open(self.session.target.device).runtime.host_memory
        self.graphs = 0
        self._operators = _NotedOperators(self.host_memory)
        self._elsewhere: dict[str, str] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what becomes of all that runs inside the block, and take nothing that was planned before."""
        torch._dynamo.reset()
        before, self.session.single = self.session.single, self._operators
        self.session.reports.clear()
        try:
            with quiet():
                yield
        finally:
            self.session.single = before

    def compiled(self, function: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
        """Return ``torch.compile(function, backend="kagent")`` for the device; `changes` are torch.compile's."""

        def backend(graph_module: Any, example_inputs: Any) -> Any:
            self.graphs += 1
            return kagent(graph_module, example_inputs, options=self.options)

        compiled: Callable[..., Any] = torch.compile(function, backend=backend, **changes)
        return compiled

    def one_by_one(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes each operator of a function through the pipeline by itself, without gradients."""

        def run(*args: Any, **kwargs: Any) -> Any:
            mode = OperatorByOperator(self.session)
            with torch.no_grad(), mode:
                result = function(*args, **kwargs)
            self._elsewhere |= mode.elsewhere
            return result

        return run

    @property
    def operators(self) -> int:
        """How many operators have run by themselves."""
        return self._operators.count + len(self._elsewhere)

    @property
    def tasks(self) -> int:
        """Kernel launches of the plans that were built."""
        return sum(report.tasks for report in self.session.reports)

    def fallbacks(self) -> tuple[tuple[str, str], ...]:
        """Return why operators ran elsewhere, by signature."""
        found = {f.signature: f.reason for report in self.session.reports for f in report.fallbacks}
        return tuple(sorted((found | self._operators.unplanned | self._elsewhere).items()))


# -- right or wrong


def assert_right(
    got: Any, want: Any, what: str, exact: Callable[[], Any], every_stride: bool = True, times: float = 2
) -> None:
    """Assert that results are eager's, or as exact as eager's.

    Devices add in other orders and have other approximations of functions. Where a value is not eager's, the error of
    the whole result against float64 counts: it may be at most some times eager's own.

    Parameters
    ----------
    got, want
        Results of the device and of eager PyTorch.
    what
        What is compared, for the message.
    exact
        Makes the same from float64 arguments; called only when it is needed.
    every_stride
        Whether all strides count; else only `telling_strides` do.
    times
        How many times eager's own error is allowed.

    Raises
    ------
    MismatchError
        At the first difference.
    """
    try:
        assert_same(dense(got), dense(want), what, every_stride)
    except MismatchError as error:
        if not _comparable(got, want, every_stride):
            raise
        try:
            best = pytree.tree_leaves(exact())
            pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), best, strict=True)
            for mine, theirs, exactly in pairs:
                if isinstance(theirs, torch.Tensor):
                    assert_as_exact(_laid_out_as(mine, theirs), _real(theirs), _real(exactly), times, what)
        except Exception as nearer:  # noqa: BLE001 - a sample may not run in float64 at all
            told = f"{error}; {str(nearer).removeprefix(what).lstrip(': ')}"
            raise MismatchError(told, error.element) from None


def _comparable(got: Any, want: Any, every_stride: bool) -> bool:
    """Whether nothing but finite floating-point values can differ."""
    mine, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if pytree.tree_structure(got) != pytree.tree_structure(want):
        return False
    return all(_differ_in_finite_values(one, other, every_stride) for one, other in zip(mine, theirs, strict=True))


def _differ_in_finite_values(mine: Any, theirs: Any, every_stride: bool) -> bool:
    if not isinstance(theirs, torch.Tensor):
        return type(mine) is type(theirs) and bool(mine == theirs)
    if not isinstance(mine, torch.Tensor) or mine.layout is not torch.strided or theirs.layout is not torch.strided:
        return False
    strides = torch.Tensor.stride if every_stride else telling_strides
    kinds = [(t.dtype, t.shape, t.requires_grad, t.is_conj(), t.is_neg(), strides(t)) for t in (mine, theirs)]
    if kinds[0] != kinds[1]:
        return False
    special = ~theirs.isfinite()
    return torch.equal(~mine.isfinite(), special) and torch.allclose(mine[special], theirs[special], equal_nan=True)


def _laid_out_as(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """A tensor with another one's strides, which differ where they lay nothing out."""
    mine, theirs = _real(mine), _real(theirs)
    return mine if mine.stride() == theirs.stride() else mine.as_strided(mine.shape, theirs.stride())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor


def widened(value: Any) -> Any:
    """Replace every floating-point tensor by the same values in float64, complex ones by complex128."""

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        dtype = torch.complex128 if leaf.is_complex() else torch.float64
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(wide, value)
