"""Cumulative operators on rows, each taken by a block whose threads work together.

A block goes over its row a stretch at a time. Each thread takes some neighbours in it; what the threads' parts come to
is scanned, and what the stretches before came to is carried on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kagent_core.codegen.generic.block_scans import PER_THREAD, Merge, scan_length, threads_for, write_merge, write_scan
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.loops import Rows
from kagent_core.codegen.groups import THREAD

MOST_THREADS = 256
"""Of a block."""


@dataclass(frozen=True)
class Running:
    """What is found along a row.

    Attributes
    ----------
    kind
        C type of the elements, as they are staged in shared memory.
    load
        Given the text of a position, returns the element there.
    states
        C type and name of each variable of what some neighbours come to.
    identity
        The variables' values for no neighbours at all.
    element
        Given a name of an element and of its position in the row, returns the variables' values for it alone.
    merge
        What two such states are together.
    store
        Given the text of a position and those of the variables of a state, writes the results there.
    regular
        For products of floats: given the name of a value, returns a condition, without which values that lie between
        stretches of a row may not be found out of order. Empty where there is no such.
    """

    kind: str
    load: Callable[[str], str]
    states: Sequence[tuple[str, str]]
    identity: Sequence[str]
    element: Callable[[str, str], Sequence[str]]
    merge: Merge
    store: Callable[[str, Sequence[str]], None]
    regular: Callable[[str], str] | None = None


def write_cumulative(k: KernelBuilder, rows: Rows, running: Running) -> None:
    """Write the kernel."""
    threads = threads_for(k, rows.length // PER_THREAD, MOST_THREADS)
    with k.groups(*rows.axes, threads=threads):
        _Cumulative(k, rows, running).write()


class _Cumulative:
    def __init__(self, k: KernelBuilder, rows: Rows, running: Running) -> None:
        self.k, self.rows, self.running = k, rows, running
        self.names = [name for _, name in running.states]
        self.carried = [f"carried_{name}" for name in self.names]
        self.staged = [f"{name}_staged" for name in self.names]
        if running.regular is None and running.kind == running.states[0][0]:
            self.staged[0] = "staged"  # elements are needed no more when results take their place
        self.per_thread = self._per_thread()
        self.tile = k.threads * self.per_thread

    def _per_thread(self) -> int:
        """Return how many neighbours a thread takes at a time: as many as shared memory has room for."""
        groups, kinds = self.k.work_groups, [kind for kind, _ in self.running.states]
        assert groups is not None
        staged = dict([("staged", self.running.kind), *zip(self.staged, kinds, strict=True)])
        each, scanned = (sum(int(kind.lstrip("biuf")) // 8 for kind in some) for some in (staged.values(), kinds))
        room, found = groups.local_nbytes - scan_length(self.k) * scanned - 4 * self.k.threads, PER_THREAD
        while found > 1 and found * each * self.k.threads > room:
            found //= 2
        return found

    def write(self) -> None:
        """Write what a block does with a row."""
        k, running, tile = self.k, self.running, self.tile
        length = k.size(self.rows.length)
        k.shared(running.kind, "staged", tile)
        for (kind, _), staged in zip(running.states, self.staged, strict=True):
            k.shared(kind, staged, tile)
        self._declare(self.carried)
        with k.loop("begin", length, step=tile):
            k.add(f"const i32 count = (i32){k.least(f'{length} - begin', str(tile))};")
            with k.block(f"for (i32 u = {THREAD}; u < count; u += {k.threads})"):
                k.add(f"staged[u] = {running.load('(begin + u)')};")
            k.barrier()
            k.add(f"const i32 own = {THREAD} * {self.per_thread};")
            k.add(f"const i32 end = {k.least(f'own + {self.per_thread}', 'count')};")
            self._declare(self.names)
            with k.block("for (i32 u = own; u < end; u++)"):
                self._take(self.names)
            write_scan(k, running.states, running.merge, running.identity)
            k.add(*(f"const {kind} previous_{n} = carried_{n};" for kind, n in running.states))
            self._run([f"{name}_before" for name in self.names])
            write_merge(k, self._named(self.carried), running.merge, self.carried, [f"{n}_all" for n in self.names])
            if running.regular is not None:
                self._check()
            k.barrier()
            with k.block(f"for (i32 u = {THREAD}; u < count; u += {k.threads})"):
                running.store("(begin + u)", [f"{staged}[u]" for staged in self.staged])
                # no barrier: what a thread reads here, it alone overwrites with the next stretch

    def _named(self, names: Sequence[str]) -> list[tuple[str, str]]:
        return [(kind, name) for (kind, _), name in zip(self.running.states, names, strict=True)]

    def _declare(self, names: Sequence[str]) -> None:
        """Write variables of a state that nothing has been taken into."""
        named = zip(self._named(names), self.running.identity, strict=True)
        self.k.add(*(f"{kind} {name} = {first};" for (kind, name), first in named))

    def _take(self, names: Sequence[str]) -> None:
        """Write what takes the element at ``u`` into a state."""
        k, running = self.k, self.running
        k.add(f"const {running.kind} element = staged[u];")
        parts = running.element("element", "(begin + u)")
        k.add(*(f"const {kind} {name}_one = {text};" for (kind, name), text in zip(running.states, parts, strict=True)))
        write_merge(k, self._named(names), running.merge, names, [f"{name}_one" for name in self.names])

    def _run(self, before: Sequence[str]) -> None:
        """Write the results of the thread's own elements, from what comes before them on."""
        k = self.k
        runs = [f"running_{name}" for name in self.names]
        self._declare(runs)
        write_merge(k, self._named(runs), self.running.merge, self.carried, before)
        if self.running.regular is not None:
            k.shared("i32", "irregular", k.threads)
            # what is carried absorbs the rest only where it is 0, infinite or NaN, and then only what stays in range
            carried = self.carried[0]
            k.add(f"const i32 carries = {carried} != 0 && {carried} - {carried} == 0;")
            whole = self.running.regular(f"{self.names[0]}_all")
            k.add(f"i32 regular = {self.running.regular(before[0])} && {whole};")
        with k.block("for (i32 u = own; u < end; u++)"):
            self._take(runs)
            k.add(*(f"{staged}[u] = {run};" for staged, run in zip(self.staged, runs, strict=True)))
            if self.running.regular is not None:
                k.add(f"regular &= !carries | {self.running.regular(runs[0])};")

    def _check(self) -> None:
        """Write what goes over a stretch again, in order, where a product has left the range of its type."""
        k = self.k
        k.add(f"irregular[{THREAD}] = !regular;")
        k.barrier()
        k.add("i32 again = 0;", f"for (i32 other = 0; other < {k.threads}; other++) again |= irregular[other];")
        with k.block("if (again)"):
            kind, name = self.running.states[0]
            with k.block(f"if ({THREAD} == 0)"):
                k.add(f"{kind} running_{name} = previous_{name};")
                with k.block("for (i32 u = 0; u < count; u++)"):
                    self._take([f"running_{name}"])
                    k.add(f"{self.staged[0]}[u] = running_{name};")
            k.barrier()
            k.add(f"{self.carried[0]} = {self.staged[0]}[count - 1];")
