"""FusionChecker: which neighbouring operators run as one kernel, and why the others do not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kagent_core.config import FUSION_RULES, Config
from kagent_core.device import OpenDevice
from kagent_core.extract.fusion.flow import DataFlow
from kagent_core.extract.fusion.generated import GeneratedKernels
from kagent_core.extract.fusion.groups import Groups
from kagent_core.extract.fusion.operator_class import OperatorClass, class_of
from kagent_core.extract.fusion.registered import RegisteredKernels
from kagent_core.extract.fusion.rules import Verdict, judge
from kagent_core.specs import FusionDecision, FusionGroup, FusionPlan, KernelDescriptor, OpCall

PairKey = tuple[int, int]


class FusionChecker:
    """Marks fusion groups.

    The rules say which neighbours may be in one kernel, and a device fuses what it can make one kernel of: first with
    the fused kernels in its registry, then with its code generator. Every other operator is a group of its own.

    Parameters
    ----------
    config
        ``fusion`` switches fusion off, ``fusion_rules`` switches rules off, and ``fusion_fuel`` ends it after so many
        pairs.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._rules = frozenset(FUSION_RULES if config.fusion_rules is None else config.fusion_rules)

    def analyze(self, calls: Sequence[OpCall], opened: OpenDevice, kept: Collection[int] | None = None) -> FusionPlan:
        """Return the groups, in an order in which they can run, and a decision for every neighbouring pair.

        Parameters
        ----------
        calls
            Placed on one device, in a valid order.
        opened
            The device.
        kept
            Buffers that are read after the last of these calls; None when that is not known, and then every result is
            taken to be.

        Raises
        ------
        RegistryError
            When two fused kernels tie.
        """
        flow = DataFlow(calls, kept)
        if not self._config.fusion:
            return _no_fusion(flow, lambda *pair: "fusion is switched off by config (fusion = false)")
        if opened.printer is None and not any(kernel.fuses for kernel in opened.registry.kernels()):
            return _no_fusion(flow, functools.partial(_no_kernel, opened))
        verdicts = {pair: judge(flow, *pair, self._rules) for pair in flow.pairs()}
        outcome = self._fuse(flow, verdicts, opened)
        fuel = self._config.fusion_fuel
        fused = [pair for pair in verdicts if outcome.is_fused(pair)]
        if fuel is not None and len(fused) > fuel:
            beyond = Verdict(False, f"out of fuel: {len(fused)} pairs would fuse, config allows {fuel} (fusion_fuel)")
            verdicts |= dict.fromkeys(fused[fuel:], beyond)
            # what was not fused at first must not be fused now in the place of what was
            at_first = set(fused)
            for pair in (pair for pair in verdicts if pair not in at_first and verdicts[pair].allowed):
                verdicts[pair] = Verdict(False, f"not without the limit of fusion_fuel either: {outcome.reason(pair)}")
            outcome = self._fuse(flow, verdicts, opened)
        return outcome.plan()

    def _fuse(self, flow: DataFlow, verdicts: Mapping[PairKey, Verdict], opened: OpenDevice) -> _Outcome:
        outcome = _Outcome(flow, verdicts, opened, Groups(flow))
        if not any(verdict.allowed for verdict in verdicts.values()):
            return outcome
        registered = RegisteredKernels(flow, verdicts, opened, self._rules)
        outcome.registered = registered
        if registered:
            for match in registered.matches(outcome.groups):
                outcome.add(match.members, match.kernel, own=match.members)
            for found in registered.recomputed(outcome.groups):
                outcome.recomputes[found.position] = found.reason
                for number, match in enumerate(found.matches):
                    owner = number == 0 and not found.stored
                    own = match.members if owner else [p for p in match.members if p != found.position]
                    outcome.add(match.members, match.kernel, own)
        if opened.printer is not None:
            generated = GeneratedKernels(flow, verdicts, opened.printer, opened.info, self._rules)
            singles = {p for p, call in enumerate(flow.calls) if _stays_single(call, opened)}
            generated.grow(outcome.groups, fixed=registered.used | singles)
            outcome.own = singles - registered.used
            outcome.notes |= generated.notes
        return outcome


def _stays_single(call: OpCall, opened: OpenDevice) -> bool:
    """Whether a kernel for one operator outranks whatever is generated for a group with it.

    The program's own kernels do, and where there is a choice of parametrised kernels, the device's.
    """
    if opened.registry.has_laid_over(call):
        return True
    return class_of(call) is OperatorClass.PARAMETRISED and opened.registry.has_registered(call)


def _no_fusion(flow: DataFlow, reason: Callable[[OpCall, OpCall], str]) -> FusionPlan:
    """Return the plan in which every call is a group of its own."""
    calls = flow.calls
    decisions = (FusionDecision(calls[p].id, calls[c].id, False, reason(calls[p], calls[c])) for p, c in flow.pairs())
    return FusionPlan(tuple(FusionGroup((call.id,)) for call in calls), tuple(decisions))


def _no_kernel(opened: OpenDevice, first: OpCall, then: OpCall) -> str:
    return (
        f"no kernel of {opened.device} fuses {first.signature} with {then.signature}, and {opened.device} has no code "
        "generator to make one"
    )


@dataclass
class _Outcome:
    """Groups as they were formed, and what is known of the reasons. Calls go by position."""

    flow: DataFlow
    verdicts: Mapping[PairKey, Verdict]
    opened: OpenDevice
    groups: Groups
    registered: RegisteredKernels | None = None
    kernels: dict[int, KernelDescriptor] = field(default_factory=dict)
    members: dict[int, tuple[int, ...]] = field(default_factory=dict)
    recomputes: dict[int, str] = field(default_factory=dict)
    notes: dict[PairKey, str] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)

    def add(self, members: tuple[int, ...], kernel: KernelDescriptor, own: Collection[int]) -> None:
        """Note a group that a registered kernel computes."""
        for position in own:
            self.kernels[position] = kernel
            self.members[position] = members

    def members_of(self, position: int) -> tuple[int, ...]:
        """Return everything that the kernel of a call computes."""
        return self.members.get(position) or self.groups.of(position)

    def is_fused(self, pair: PairKey) -> bool:
        """Whether the consumer's kernel computes what the producer makes."""
        return pair[0] in self.members_of(pair[1])

    def plan(self) -> FusionPlan:
        """Return the groups in an order in which they can run, and the decisions."""
        calls = self.flow.calls
        decisions = tuple(
            FusionDecision(calls[pair[0]].id, calls[pair[1]].id, self.is_fused(pair), self.reason(pair))
            for pair in self.verdicts
        )
        return FusionPlan(tuple(self._group(own) for own in self.groups.in_order()), decisions)

    def _group(self, own: tuple[int, ...]) -> FusionGroup:
        members = self.members_of(own[0])
        ids = [call.id for call in self.flow.calls]
        inner = frozenset[int]()
        if len(members) > 1:
            inner = frozenset(
                spec.buffer
                for position in members
                if position not in own or not self._is_read_outside(position)
                for spec in self.flow.calls[position].fresh_results
            )
        return FusionGroup(
            calls=tuple(ids[p] for p in own),
            recomputed=tuple(ids[p] for p in members if p not in own),
            inner=tuple(sorted(inner)),
        )

    def _is_read_outside(self, position: int) -> bool:
        """Whether a result must be in memory: a kernel reads it that does not compute it."""
        readers = self.flow.readers[position]
        return self.flow.is_kept(position) or not readers or not all(self.is_fused((position, r)) for r in readers)

    # -- reasons

    def reason(self, pair: PairKey) -> str:
        """Return why a pair is fused, or why not."""
        verdict = self.verdicts[pair]
        if self.is_fused(pair):
            kernel = self.kernels.get(pair[1])
            how = f"kernel '{kernel.name}'" if kernel is not None else self._generated(pair[0])
            again = self.recomputes.get(pair[0])
            return f"{verdict.reason}; {how}" + (f"; {again}" if again else "")
        if not verdict.allowed:
            return verdict.reason
        taken = next((p for p in pair if p in self.kernels), None)
        if taken is not None and len(self.members_of(taken)) > 1:
            return f"{self.flow.calls[taken].name} is in kernel '{self.kernels[taken].name}', which ends there"
        noted = self.registered.notes.get(pair) if self.registered is not None else None
        noted = self.notes.get(pair) or noted
        single = next((p for p in pair if p in self.own), None)
        if noted is None and single is not None and self.opened.printer is not None:
            return (
                f"{self.flow.calls[single].name} has a kernel of its own in the registry, which outranks generated ones"
            )
        return noted or self._without_kernel(pair)

    def _generated(self, producer: int) -> str:
        if not self._is_read_outside(producer):
            return "a generated kernel"
        return "a generated kernel, which also writes what others read"

    def _without_kernel(self, pair: PairKey) -> str:
        first, then = (self.flow.calls[p] for p in pair)
        if self.registered is not None and self.registered.fuses(first, then):
            told = f"no kernel of {self.opened.device} fuses {first.signature} with {then.signature}"
            return f"{told} and just what is around the two"
        return _no_kernel(self.opened, first, then)
