"""Groups for which the device's code generator makes a kernel."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from kagent_core.device import CodeGenerator
from kagent_core.extract.fusion.flow import DataFlow
from kagent_core.extract.fusion.groups import Groups
from kagent_core.extract.fusion.operator_class import loops_of
from kagent_core.extract.fusion.resources import MOST_OPERATORS, estimate
from kagent_core.extract.fusion.rules import Verdict
from kagent_core.specs import DeviceInfo, OpCall

PairKey = tuple[int, int]


class GeneratedKernels:
    """Grows groups pair by pair, for as long as the code generator can make one kernel of each.

    A generated kernel can write whatever it makes, so a value with many readers is stored and never computed twice.

    Parameters
    ----------
    flow, verdicts
        The calls, and what the rules say of each pair of neighbours.
    generator
        The device's.
    info
        The device's limits.
    rules
        Names of the rules that are switched on.
    """

    def __init__(
        self,
        flow: DataFlow,
        verdicts: Mapping[PairKey, Verdict],
        generator: CodeGenerator,
        info: DeviceInfo,
        rules: Collection[str],
    ) -> None:
        self._flow = flow
        self._verdicts = verdicts
        self._generator = generator
        self._info = info
        self._rules = rules
        self.notes: dict[PairKey, str] = {}
        """Why two calls that the rules allow to fuse are not fused."""

    def grow(self, groups: Groups, fixed: Collection[int]) -> None:
        """Merge in `groups` what can be one kernel.

        The generator is asked once for each group that could be one, and pair by pair only for a group that it refuses.

        Parameters
        ----------
        groups
            To merge in.
        fixed
            Calls whose group is settled.
        """
        pairs = [
            (producer, consumer)
            for (producer, consumer), verdict in self._verdicts.items()
            if verdict.allowed and producer not in fixed and consumer not in fixed
        ]
        hoped = groups.copy()
        self._merge(pairs, hoped, ask=False)
        refused: set[int] = set()
        for members in sorted({hoped.of(position) for pair in pairs for position in pair}):
            if len(members) == 1:
                continue
            if self._generator_refusal(members) is None and groups.way_back(members) is None:
                groups.merge(members)
            else:
                refused.update(members)
        again = [pair for pair in pairs if refused.issuperset(pair)]
        if again:
            self.notes = {pair: reason for pair, reason in self.notes.items() if pair not in again}
            self._merge(again, groups, ask=True)

    def _merge(self, pairs: Sequence[PairKey], groups: Groups, ask: bool) -> None:
        for producer, consumer in pairs:
            if consumer in groups.of(producer):
                continue
            members = groups.union((producer, consumer))
            reason = self._refusal(members, groups)
            if reason is None and ask:
                reason = self._generator_refusal(members)
            if reason is None:
                groups.merge(members)
            else:
                self.notes[producer, consumer] = reason

    def _generator_refusal(self, members: tuple[int, ...]) -> str | None:
        calls = [self._flow.calls[p] for p in members]
        refused = self._generator.can_generate(calls, inner_buffers(self._flow, members))
        return refused and f"the code generator of {self._info.device} refuses: {refused}"

    def _refusal(self, members: tuple[int, ...], groups: Groups) -> str | None:
        """Return why some calls cannot be one kernel, whatever the generator says, or None."""
        limited = "resources" in self._rules
        if limited and len(members) > MOST_OPERATORS:
            return f"resources: one kernel would compute {len(members)} operators, more than {MOST_OPERATORS}"
        calls = [self._flow.calls[p] for p in members]
        for pair in self._inside(members):
            if not self._verdicts[pair].allowed:
                return f"{self._flow.calls[pair[0]].name} would be in it, but {self._verdicts[pair].reason}"
        inner = inner_buffers(self._flow, members)
        reason = _disagreement(calls, inner)
        if reason is None:
            way_out = groups.way_back(members)
            reason = None if way_out is None else f"{self._flow.calls[way_out].name} comes between them"
        if reason is None and limited:
            beyond = estimate(calls, inner, self._info).beyond(self._info)
            reason = beyond and f"resources: {beyond}"
        return reason

    def _inside(self, members: Collection[int]) -> Iterator[PairKey]:
        inside = set(members)
        for consumer in members:
            yield from ((producer, consumer) for producer in self._flow.producers[consumer] if producer in inside)


def inner_buffers(flow: DataFlow, members: Collection[int]) -> frozenset[int]:
    """Return the buffers of results that nobody but the members reads."""
    inside = set(members)
    return frozenset(
        spec.buffer
        for position in members
        if not flow.is_kept(position) and inside.issuperset(flow.readers[position]) and flow.readers[position]
        for spec in flow.calls[position].fresh_results
    )


def _disagreement(calls: Sequence[OpCall], inner: Collection[int]) -> str | None:
    """Return why the loops of some calls are not one, or None."""
    loops = {call.name: loops_of(call) for call in calls}
    reductions = {name: each for name, each in loops.items() if each.reduced}
    if reductions:
        first, nest = next(iter(reductions.items()))
        for name, other in reductions.items():
            if other != nest:
                return f"the loop of {first} over {nest} and that of {name} over {other} do not agree"
    else:
        written = [call for call in calls if any(spec.buffer not in inner for spec in call.fresh_results)]
        nest = max((loops[call.name] for call in written), key=lambda each: math.prod(each.full))
    whole, rows = math.prod(nest.full), math.prod(nest.kept)
    for call in calls:
        for spec in call.fresh_results:
            if spec.buffer not in inner and spec.numel not in (whole, rows):
                return f"{call.name}, whose result is read outside, does not make one element per step of {nest}"
    return None
