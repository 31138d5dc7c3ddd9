"""How fast one kernel is: next to the kernel that its device has without it, and to eager PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from kagent_core.bench.timing import Timing, no_collection, one_thread, time_calls
from kagent_core.capture.graph import CapturedGraph, input_spec
from kagent_core.config import Config
from kagent_core.errors import KagentError
from kagent_core.execute.plan import ExecutionPlan
from kagent_core.kernels import UserKernel, activate
from kagent_core.pipeline import build_plan
from kagent_core.session import session_for
from kagent_core.testing.larger_samples import larger
from kagent_core.testing.operator_samples import OperatorCall

SIZES = (2**10, 2**14, 2**18, 2**21)
"""Elements of the largest tensor of what is timed."""

ROUNDS = 10
_ROUND_US = 1000.0  # calls of a round take about so long, or one call does
_SLOWEST_US = 300_000.0  # calls that would take longer are not timed
_GROWTH = 1.5  # of the time with the elements, at most: that of a product of matrices

YOURS, OWN, EAGER = "yours", "the device's own", "eager"


@dataclass(frozen=True)
class SizeTiming:
    """Times of one size.

    Attributes
    ----------
    tensors, numel
        What the operator was given, and how many elements the largest of them has.
    per_call
        By contender.
    own_kernels
        Names of what the device runs without the kernel.
    """

    tensors: str
    numel: int
    per_call: dict[str, Timing]
    own_kernels: tuple[str, ...]

    def ratio(self, peer: str) -> float | None:
        """How many times as long as the peer's the kernel's call takes, by the minima; None where it is missing."""
        return self.per_call[YOURS].minimum / self.per_call[peer].minimum if peer in self.per_call else None

    def as_dict(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "tensors": self.tensors,
            "own_kernels": list(self.own_kernels),
            "per_call": {name: timing.as_dict() for name, timing in self.per_call.items()},
        }


@dataclass
class KernelTimes:
    """Times of one kernel, by size, and why there are not more of them."""

    sizes: list[SizeTiming] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def time_kernel(
    kernel: UserKernel,
    config: Config,
    base: OperatorCall,
    on_size: Callable[[], None] = lambda: None,
) -> KernelTimes:
    """Time a kernel with calls like one that it takes, of several sizes; in one thread, contenders in turn.

    The kernel, and the device's own, run as a plan of one operator, as in a compiled model; what kagent itself needs
    for a call is in both.

    Parameters
    ----------
    kernel
        Of one operator; need not be registered.
    config
        Without kernels of its own.
    base
        A call that the kernel computes.
    on_size
        Called after every size.
    """
    found = KernelTimes()
    for numel in SIZES:
        if found.sizes and _expected_us(found.sizes[-1], numel) > _SLOWEST_US:
            found.remarks.append(f"a call of about {numel:,} elements would take too long")
            break
        call = larger(base, numel)
        if call is None:
            found.remarks.append(f"no call of about {numel:,} elements could be made of {base.sample}")
            continue
        timed = _time_size(kernel, config, call)
        on_size()
        if timed is None:
            found.remarks.append(f"the kernel does not take {_shown(call)}")
            continue
        found.sizes.append(timed)
    return found


def _expected_us(smaller: SizeTiming, numel: int) -> float:
    slowest = max(timing.minimum for timing in smaller.per_call.values())
    return slowest * float((numel / smaller.numel) ** _GROWTH)


def _time_size(kernel: UserKernel, config: Config, call: OperatorCall) -> SizeTiming | None:
    args, kwargs = call.copied()
    with torch.no_grad():
        with activate(kernel):
            mine = _plan(config, call)
        if all(task.kernel.origin != kernel.descriptor.origin for task in mine.tasks):
            return None
        contenders = {YOURS: _runner(mine, call)}
        own: tuple[str, ...] = ()
        try:
            theirs = _plan(config, call)
        except KagentError:  # the device has none, and the config allows no fallback
            pass
        else:
            contenders[OWN] = _runner(theirs, call)
            own = tuple(dict.fromkeys(task.kernel.name for task in theirs.tasks))
        contenders[EAGER] = lambda: call.overload(*args, **kwargs)
        with one_thread(), no_collection():
            slowest = max(_once_us(contender) for contender in contenders.values())
            per_call = time_calls(contenders, max(int(_ROUND_US / slowest), 1), ROUNDS)
    return SizeTiming(_shown(call), max(t.numel() for t in call.tensors), per_call, own)


def _plan(config: Config, call: OperatorCall) -> ExecutionPlan:
    """Make a plan for one call, as for a model that consists of it."""
    args, kwargs = call.copied()
    leaves, structure = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        by_place, by_name = pytree.tree_unflatten([given.get(n, leaf) for n, leaf in enumerate(leaves)], structure)
        results = pytree.tree_leaves(call.overload(*by_place, **by_name))
        return tuple(leaf for leaf in results if isinstance(leaf, torch.Tensor))

    tensors = [leaves[place] for place in places]
    graph = CapturedGraph(make_fx(run, tracing_mode="fake")(*tensors), "one_operator")
    return build_plan(session_for(config), graph.program(tensors), graph.constants)


def _runner(plan: ExecutionPlan, call: OperatorCall) -> Callable[[], object]:
    args, kwargs = call.copied()
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return lambda: plan.run(tensors)


def _once_us(call: Callable[[], object]) -> float:
    call()
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def _shown(call: OperatorCall) -> str:
    return ", ".join(str(input_spec(tensor, 0, whole_storage=False)) for tensor in call.tensors)
