"""How threads that share a row put together what each of them has found: as a tree, through shared memory or lanes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence

from kagent_core.codegen.groups import THREAD, SubGroups, WorkGroups
from kagent_core.codegen.loops.group_layout import PART, GroupLayout
from kagent_core.codegen.loops.reductions import Accumulator
from kagent_core.codegen.loops.states import RunningState, scope
from kagent_core.codegen.text import Text

DISTANCE = "distance"
"""Variable with how many parts apart two threads are."""

FUNCTIONS = {"sum": "add", "any": "max", "all": "min", "min": "min", "max": "max", "fmax": "max"}
"""Functions of sub-groups by kind of reduction; any and all are 0 or 1."""

_NARROW = frozenset({"i8", "i16", "u8", "u16"})


class Partial(ABC):
    """What one thread has found of something."""

    needs_elements = False
    """Whether it must not be put together with that of another thread where neither has taken an element."""

    kinds: Sequence[str]
    """Types of its values."""

    @abstractmethod
    def found(self) -> list[str]:
        """Return the values as text."""

    @abstractmethod
    def take(self, others: Sequence[str]) -> list[str]:
        """Return statements that take in what another thread has found, given as variables."""

    @abstractmethod
    def become(self, values: Sequence[str]) -> list[str]:
        """Return statements by which it becomes what some texts say."""

    def reduced(self, lanes: SubGroups) -> str | None:
        """Return what it comes to over a sub-group, where a function says that."""
        return None


class PartialValue(Partial):
    """The running value of a plain reduction."""

    def __init__(self, running: Accumulator) -> None:
        self._running = running
        self._rest = f"{running.name}_rest"
        self.kinds = [running.running_type] * (2 if running.compensated else 1)

    def found(self) -> list[str]:
        """Return the value, and what it has lost where that is kept."""
        return [self._running.name, self._rest] if self._running.compensated else [self._running.found()]

    def take(self, others: Sequence[str]) -> list[str]:
        """Return statements that take in another thread's value."""
        if self._running.compensated:
            return [self._running.add(others[0]), f"{self._rest} += {others[1]};"]
        return self._running.combine(others[0])

    def become(self, values: Sequence[str]) -> list[str]:
        """Return statements that set it."""
        name = self._running.name
        lines = [f"{name} = {values[0]};"]
        if self._running.compensated:
            return [*lines, f"{self._rest} = {values[1]};"]
        return [*lines, f"{name}_nan = {name} != {name};"] if self._running.tracks_nan else lines

    def reduced(self, lanes: SubGroups) -> str | None:
        """Return what it comes to over a sub-group; such functions may lose NaN."""
        function = lanes.reduces.get(FUNCTIONS.get(self._running.kind, ""))
        if function is None or self._running.tracks_nan or self._running.compensated:
            return None
        if self.kinds[0] not in lanes.reduced_types:
            return None
        return function.format(value=self._running.found())


class PartialState(Partial):
    """The running state of a compound reduction."""

    needs_elements = True

    def __init__(self, state: RunningState) -> None:
        self._state = state
        self.kinds = [kind for kind, _ in state.variables]

    def found(self) -> list[str]:
        """Return the state's parts."""
        return self._state.names

    def take(self, others: Sequence[str]) -> list[str]:
        """Return statements that merge another thread's state."""
        return scope(self._state.merge(others))

    def become(self, values: Sequence[str]) -> list[str]:
        """Return statements that set it."""
        return [f"{name} = {value};" for name, value in zip(self._state.names, values, strict=True)]


class Trees:
    """Writes how partial results become one, which every thread of the row has then.

    Parameters
    ----------
    text
        To write to.
    groups
        How things are spelled.
    layout
        Which threads share a row.
    """

    def __init__(self, text: Text, groups: WorkGroups, layout: GroupLayout) -> None:
        self._text = text
        self._groups = groups
        self._layout = layout
        self._most: Counter[str] = Counter()
        # across memory, neighbouring threads have other rows: there, lanes are not those that share one
        self._lanes = None if layout.across else groups.sub_groups

    def declared(self) -> list[str]:
        """Return the declarations of the memory that all trees of the kernel share."""
        return [
            self._groups.declared(kind, f"shared_{kind}_{number}", self._layout.threads)
            for kind, count in sorted(self._most.items())
            for number in range(count)
        ]

    @property
    def nbytes(self) -> int:
        """How much memory that is."""
        return sum(self._layout.threads * int(kind.lstrip("biuf")) // 8 * count for kind, count in self._most.items())

    def join(self, partials: Sequence[Partial], active: str) -> None:
        """Write how the partial results of all threads of a row become one.

        Parameters
        ----------
        partials
            What each thread has found. All of them go the same way together, and wait for each other together.
        active
            How many threads may have taken elements, the first ones, as text: it may be more than there are.
        """
        guard = active if any(partial.needs_elements for partial in partials) else None
        lanes = self._lanes
        if lanes is None or not self._within_lanes(partials, lanes, guard):
            self._through_memory(partials, guard)

    def _through_memory(self, partials: Sequence[Partial], guard: str | None) -> None:
        """Halve the number of threads that have something until it is one."""
        places = self._places(partials)
        self._put(partials, places, THREAD)
        self._text.add(self._groups.barrier)
        half = self._layout.parts // 2
        self._text.open(f"for (i32 {DISTANCE} = {half}; {DISTANCE} > 0; {DISTANCE} /= 2) {{")
        condition = f"{PART} < {DISTANCE}"
        self._text.open(f"if ({condition}{f' && {PART} + {DISTANCE} < {guard}' if guard else ''}) {{")
        self._take_from(partials, places, self._layout.beyond(DISTANCE))
        self._put(partials, places, THREAD)
        self._text.close()
        self._text.add(self._groups.barrier)
        self._text.close()
        self._become(partials, places)
        self._text.add(self._groups.barrier)  # before others write there again

    def _within_lanes(self, partials: Sequence[Partial], lanes: SubGroups, guard: str | None) -> bool:
        """Put together what the threads of each sub-group have, then, through memory, what sub-groups have.

        Returns whether the sub-groups have what it takes.
        """
        parts = self._layout.parts
        functions = [partial.reduced(lanes) for partial in partials]
        whole = self._layout.slots == 1 or (lanes.lanes is not None and lanes.lanes <= parts)
        if whole and None not in functions:
            for partial, function in zip(partials, functions, strict=True):
                self._text.add(*partial.become([str(function)]))
        elif lanes.shuffle:
            self._shuffle(partials, lanes, guard)
        else:
            return False
        if lanes.lanes is None or lanes.lanes < parts:
            self._over_sub_groups(partials, lanes, guard)
        elif guard is not None:  # only the first thread is sure to have all
            self._text.add("{")
            first = f"{lanes.lane} - {PART}"
            self._text.depth += 1
            others = self._shuffled(partials, lanes, first)
            for partial in partials:
                self._text.add(*partial.become([next(others) for _ in partial.kinds]))
            self._text.close()
        return True

    def _shuffle(self, partials: Sequence[Partial], lanes: SubGroups, guard: str | None) -> None:
        """Take in what lanes have that are 1, 2, 4... lanes away."""
        parts = self._layout.parts
        if lanes.lanes is None:
            end = f"{DISTANCE} < {parts} && {DISTANCE} < {lanes.size}"
        else:
            end = f"{DISTANCE} < {min(parts, lanes.lanes)}"
        self._text.open(f"for (i32 {DISTANCE} = 1; {end}; {DISTANCE} *= 2) {{")
        others = self._shuffled(partials, lanes, f"{lanes.lane} ^ {DISTANCE}")
        if guard is not None:
            self._text.open(f"if (({PART} ^ {DISTANCE}) < {guard}) {{")
        for partial in partials:
            self._text.add(*partial.take([next(others) for _ in partial.kinds]))
        self._text.close(2 if guard is not None else 1)

    def _over_sub_groups(self, partials: Sequence[Partial], lanes: SubGroups, guard: str | None) -> None:
        """Put together what sub-groups have: every thread does so by itself, from memory."""
        places, size, parts = self._places(partials), lanes.size, self._layout.parts
        self._text.open(f"if ({PART} % {size} == 0) {{")
        self._put(partials, places, THREAD)
        self._text.close()
        self._text.add(self._groups.barrier)
        self._become(partials, places)
        until = f"next < {parts}{f' && next < {guard}' if guard else ''}"
        self._text.open(f"for (i32 next = {size}; {until}; next += {size}) {{")
        first = self._layout.first
        self._take_from(partials, places, "next" if first == "0" else f"{first} + next")
        self._text.close()
        self._text.add(self._groups.barrier)

    # -- inside

    def _places(self, partials: Sequence[Partial]) -> list[str]:
        """Return the shared array of each value, one after the other."""
        used: Counter[str] = Counter()
        places = []
        for kind in (kind for partial in partials for kind in partial.kinds):
            places.append(f"shared_{kind}_{used[kind]}")
            used[kind] += 1
        self._most |= used
        return places

    def _put(self, partials: Sequence[Partial], places: Sequence[str], where: str) -> None:
        found = [text for partial in partials for text in partial.found()]
        self._text.add(*(f"{place}[{where}] = {text};" for place, text in zip(places, found, strict=True)))

    def _take_from(self, partials: Sequence[Partial], places: Sequence[str], where: str) -> None:
        kinds = [kind for partial in partials for kind in partial.kinds]
        names = [f"other_{number}" for number in range(len(kinds))]
        for kind, name, place in zip(kinds, names, places, strict=True):
            self._text.add(f"const {kind} {name} = {place}[{where}];")
        left = iter(names)
        for partial in partials:
            self._text.add(*partial.take([next(left) for _ in partial.kinds]))

    def _become(self, partials: Sequence[Partial], places: Sequence[str]) -> None:
        left = iter(places)
        for partial in partials:
            self._text.add(*partial.become([f"{next(left)}[{self._layout.first}]" for _ in partial.kinds]))

    def _shuffled(self, partials: Sequence[Partial], lanes: SubGroups, lane: str) -> Iterator[str]:
        """Declare what another lane has found; return the names."""
        found = [item for partial in partials for item in zip(partial.kinds, partial.found(), strict=True)]
        names = [f"other_{number}" for number in range(len(found))]
        for name, (kind, text) in zip(names, found, strict=True):
            value = f"(i32)({text})" if kind in _NARROW else text
            taken = lanes.shuffle.format(value=value, lane=lane)
            self._text.add(f"const {kind} {name} = {f'({kind}){taken}' if kind in _NARROW else taken};")
        return iter(names)
