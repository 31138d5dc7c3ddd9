"""Groups for which the device has a fused kernel, written by hand and registered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kagent_core.device import OpenDevice
from kagent_core.extract.fused_call import fused_call
from kagent_core.extract.fusion.flow import DataFlow
from kagent_core.extract.fusion.groups import Groups
from kagent_core.extract.fusion.rules import Verdict
from kagent_core.extract.fusion.traffic import made_nbytes, read_nbytes
from kagent_core.registry.acceptance import group_refusal
from kagent_core.specs import Access, KernelDescriptor, OpCall, TensorSpec, flatten_tensors

PairKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Match:
    """Calls that one registered kernel computes.

    Attributes
    ----------
    kernel
        What computes them.
    members
        Positions of the calls, in order. The last one's result is what the kernel writes.
    """

    kernel: KernelDescriptor
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A value that several kernels compute for themselves.

    Attributes
    ----------
    position
        Of the call that makes it.
    matches
        The kernels that compute it again.
    stored
        Whether the call runs on its own as well, because others read the value.
    reason
        The bytes that decided.
    """

    position: int
    matches: tuple[Match, ...]
    stored: bool
    reason: str


class RegisteredKernels:
    """Finds groups for the fused kernels of a device's registry.

    A registered kernel writes the result of its last operator and nothing else, so whatever else a group makes must
    be used up inside of it, or be computed again.

    Parameters
    ----------
    flow, verdicts
        The calls, and what the rules say of each pair of neighbours.
    opened
        The device.
    rules
        Names of the rules that are switched on.
    """

    def __init__(
        self, flow: DataFlow, verdicts: Mapping[PairKey, Verdict], opened: OpenDevice, rules: Collection[str]
    ) -> None:
        self._flow = flow
        self._verdicts = verdicts
        self._opened = opened
        self._rules = rules
        sequences = {kernel.fuses for kernel in opened.registry.kernels() if len(kernel.fuses) > 1}
        self._sequences = sorted(sequences, key=lambda fuses: (-len(fuses), fuses))
        self.used: set[int] = set()
        """Positions of the calls whose group is settled."""
        self.notes: dict[PairKey, str] = {}
        """Why two calls that a kernel fuses are not fused, where that is known."""

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def fuses(self, first: OpCall, then: OpCall) -> bool:
        """Whether any kernel has the operators of two calls, in this order."""
        return any(
            first.signature in fuses and then.signature in fuses[fuses.index(first.signature) + 1 :]
            for fuses in self._sequences
        )

    def matches(self, groups: Groups) -> Iterator[Match]:
        """Merge in `groups`, and yield, what registered kernels compute: the longest first."""
        for fuses in self._sequences:
            for sink, call in enumerate(self._flow.calls):
                if call.signature == fuses[-1] and sink not in self.used:
                    match = self._find(sink, fuses, groups, shared=None)
                    if match is not None:
                        self.used.update(match.members)
                        groups.merge(match.members)
                        yield match

    def recomputed(self, groups: Groups) -> Iterator[Recomputed]:
        """Merge in `groups`, and yield, what is better computed several times than stored."""
        for position, readers in enumerate(self._flow.readers):
            if position in self.used or len(readers) + self._flow.is_kept(position) < 2:
                continue
            found = self._recompute(position, groups)
            if found is not None:
                yield found

    # -- one kernel

    def _find(self, sink: int, fuses: tuple[str, ...], groups: Groups, shared: int | None) -> Match | None:
        """Return the first group that ends with `sink` and that a kernel for `fuses` takes."""
        for members in self._candidates(sink, fuses, shared):
            kernel = self._kernel_for(members, groups, shared)
            if kernel is not None:
                return Match(kernel, members)
        return None

    def _candidates(self, sink: int, fuses: tuple[str, ...], shared: int | None) -> Iterator[tuple[int, ...]]:
        """Yield the groups of these operators in this order of which only `sink` (and `shared`) is read outside."""
        wanted = Counter(fuses)
        wanted[fuses[-1]] -= 1
        seen: set[frozenset[int]] = set()
        waiting = [(frozenset({sink}), wanted)]
        while waiting:
            members, missing = waiting.pop()
            if members in seen:
                continue
            seen.add(members)
            if len(members) == len(fuses):
                ordered = tuple(sorted(members))
                in_order = tuple(self._flow.calls[p].signature for p in ordered) == fuses
                if in_order and (shared is None or shared in members):
                    yield ordered
                continue
            for producer, consumer in self._ways_in(members, shared):
                signature = self._flow.calls[producer].signature
                if missing[signature] > 0 and self._is_free(producer, consumer, members, shared):
                    waiting.append((members | {producer}, missing - Counter((signature,))))

    def _ways_in(self, members: Collection[int], shared: int | None) -> Iterator[PairKey]:
        # what a shared value is made of lies in memory: others compute it, too
        for consumer in sorted(members):
            if consumer != shared:
                for producer in sorted(self._flow.producers[consumer], reverse=True):
                    if producer not in members:
                        yield producer, consumer

    def _is_free(self, producer: int, consumer: int, members: Collection[int], shared: int | None) -> bool:
        """Whether a producer may be inside: nobody outside needs its result."""
        if producer in self.used or not self._verdicts[producer, consumer].allowed:
            return False
        if producer == shared:
            return True
        outside = [reader for reader in self._flow.readers[producer] if reader not in members]
        if not outside and not self._flow.is_kept(producer):
            return True
        call = self._flow.calls[producer]
        who = f"{self._flow.calls[outside[0]].name} reads" if outside else "later tasks or the caller read"
        reason = f"a registered kernel would not write the result of {call.name}, which {who}"
        self.notes.setdefault((producer, consumer), reason)  # what a whole group was refused for says more
        return False

    def _kernel_for(self, members: tuple[int, ...], groups: Groups, shared: int | None) -> KernelDescriptor | None:
        calls = [self._flow.calls[p] for p in members]
        refused = self._disagreement(members)
        kernel = None
        if refused is None:
            kernel = self._opened.registry.find_fused(calls)
            refused = self._refusals(calls) if kernel is None else self._misfit(kernel, calls)
        if refused is None and shared is None:
            way_out = groups.way_back(members)
            if way_out is not None:
                refused = f"{self._flow.calls[way_out].name} comes between them"
        if refused is None:
            return kernel
        self.notes.update(dict.fromkeys(self._inside(members), refused))
        return None

    def _disagreement(self, members: tuple[int, ...]) -> str | None:
        """Return why two of the calls may not be in one kernel."""
        refused = (self._verdicts[pair] for pair in self._inside(members) if not self._verdicts[pair].allowed)
        return next((verdict.reason for verdict in refused), None)

    def _refusals(self, calls: list[OpCall]) -> str:
        fuses = tuple(call.signature for call in calls)
        kernels = self._opened.registry.kernels("+".join(fuses))
        told = [f"kernel '{kernel.name}' {group_refusal(kernel, calls)}" for kernel in kernels if kernel.fuses == fuses]
        return "; ".join(told)

    def _misfit(self, kernel: KernelDescriptor, calls: list[OpCall]) -> str | None:
        """Return why a kernel that takes the tensors still does not fit, or None."""
        inner = {spec.buffer for call in calls[:-1] for spec in call.fresh_results}
        reason = misfit(kernel, calls, inner)
        if reason is None and "resources" in self._rules:
            # a kernel written by hand has the registers and the shared memory that it has; its arguments are ours
            needed = len(fused_call(calls, inner).arguments) + 1
            limit = self._opened.info.max_parameters
            if needed > limit:
                return f"resources: one kernel would need {needed} parameters, {self._opened.device} has {limit}"
        return reason

    def _inside(self, members: Collection[int]) -> Iterator[PairKey]:
        for consumer in members:
            for producer in self._flow.producers[consumer]:
                if producer in members:
                    yield producer, consumer

    # -- values with many readers

    def _recompute(self, position: int, groups: Groups) -> Recomputed | None:
        """Return the kernels that would compute a value for themselves, if that moves fewer bytes."""
        matches = self._takers(position, groups)
        if not matches:
            return None
        call = self._flow.calls[position]
        reason = None
        if "recompute" not in self._rules:
            reason = "rule 'recompute' is switched off by config (fusion_rules)"
        elif self._flow.overwriters(position):
            writer = self._flow.calls[self._flow.overwriters(position)[0]]
            reason = f"{call.name} cannot be computed again: {writer.name} overwrites what it reads"
        if reason is not None:
            self._renote(position, matches, reason)
            return None
        covered = {reader for match in matches for reader in match.members}
        stored = self._flow.is_kept(position) or any(r not in covered for r in self._flow.readers[position])
        again = sum(self._read_nbytes(match.members) for match in matches)
        kept = sum(self._read_nbytes([p for p in match.members if p != position]) for match in matches)
        if not stored:
            kept += read_nbytes((call,)) + made_nbytes(call)
        told = f"recompute: computing {call.name} again moves {again} bytes, storing its result {kept}"
        found = Recomputed(position, matches, stored, told)
        if again >= kept:
            self._renote(position, matches, told)
            return None
        return found if self._accept(found, groups) else None

    def _takers(self, position: int, groups: Groups) -> tuple[Match, ...]:
        """Return kernels that compute a value and what one of its readers makes of it, none in the way of another."""
        found: list[Match] = []
        taken = set(self.used)
        for fuses in self._sequences:
            if self._flow.calls[position].signature not in fuses[:-1]:
                continue
            for sink in self._downstream(position, steps=len(fuses) - 1):
                if sink in taken or self._flow.calls[sink].signature != fuses[-1]:
                    continue
                match = self._find(sink, fuses, groups, shared=position)
                if match is not None and not taken.intersection(match.members):
                    found.append(match)
                    taken.update(p for p in match.members if p != position)
        return tuple(found)

    def _downstream(self, position: int, steps: int) -> list[int]:
        """Return the calls that a value reaches through so many results at most."""
        reached: set[int] = set()
        last = {position}
        for _ in range(steps):
            last = {reader for made in last for reader in self._flow.readers[made]} - reached
            reached |= last
        return sorted(reached)

    def _accept(self, found: Recomputed, groups: Groups) -> bool:
        """Merge in `groups` what a value's kernels compute, unless one of them would have to wait for itself."""
        tried = groups.copy()
        owned: list[list[int]] = []
        for number, match in enumerate(found.matches):
            own = [p for p in match.members if p != found.position or (number == 0 and not found.stored)]
            way_out = tried.way_back(own)
            if way_out is not None:
                self._renote(found.position, found.matches, f"{self._flow.calls[way_out].name} comes between them")
                return False
            tried.merge(own)
            owned.append(own)
        for own in owned:
            groups.merge(own)
            self.used.update(own)
        self.used.add(found.position)
        return True

    def _read_nbytes(self, positions: Collection[int]) -> int:
        return read_nbytes([self._flow.calls[p] for p in positions])

    def _renote(self, position: int, matches: Collection[Match], reason: str) -> None:
        for match in matches:
            for producer, consumer in self._inside(match.members):
                if producer == position:
                    self.notes[producer, consumer] = reason


def misfit(kernel: KernelDescriptor, calls: Sequence[OpCall], inner: Collection[int]) -> str | None:
    """Return why a registered kernel, whose dtypes and layouts fit, does not compute what a group does, or None.

    Parameters
    ----------
    kernel
        Registered for the operators of the group.
    calls
        The group.
    inner
        Buffers of results that stay inside it.
    """
    made: dict[int, TensorSpec] = {}
    for call in calls:
        view = next((spec for spec in call.inputs if made.get(spec.buffer, spec) != spec), None)
        if view is not None:
            return (
                f"{call.name} reads {made[view.buffer]} as a view, {view} with strides {view.strides}, of which kernel "
                f"'{kernel.name}' knows nothing"
            )
        made.update((spec.buffer, spec) for spec in call.fresh_results)
    for call in calls[:-1]:
        if any(spec.buffer not in inner for spec in call.fresh_results):
            return f"kernel '{kernel.name}' would not write the result of {call.name}"
    if not _names_inputs(kernel) and not _is_chain(calls):
        return (
            f"kernel '{kernel.name}' declares no parameters, and so takes each result as the first argument of the "
            "next operator, and nowhere else"
        )
    return None


def _names_inputs(kernel: KernelDescriptor) -> bool:
    """Whether a kernel's prototype says which tensors come from outside, so that the registry has checked it."""
    return any(parameter.access is not Access.OUT for parameter in kernel.parameters)


def _is_chain(calls: Sequence[OpCall]) -> bool:
    """Whether each result is the first argument of the next call, and goes nowhere else."""
    made: set[int] = set()
    for number, call in enumerate(calls):
        first, *rest = call.arguments.values()
        if number and [first] != list(calls[number - 1].fresh_results):
            return False
        if any(spec.buffer in made for value in rest for spec in flatten_tensors(value)):
            return False
        made.update(spec.buffer for spec in call.fresh_results)
    return True
