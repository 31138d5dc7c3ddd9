"""A segment's generated kernels as one translation unit, and the table that they find their arguments in.

A kernel is compiled once however many tasks launch it. Every task has a stretch of one table of int64: the addresses of
its tensors, its sizes, and a place for what it reports. A run, tasks that follow each other, is one function that calls
their kernels; it gets the table's address. So the text depends on what the kernels compute and in which order, and not
on sizes or addresses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from kagent_core.codegen.c_family import REPORT
from kagent_core.native.pieces import OWN, PiecedText
from kagent_core.specs import KernelTask, PackedArg, TensorSpec

_HEAD = re.compile(r"^static void ", re.MULTILINE)


def is_generated(task: KernelTask) -> bool:
    """Whether a task's kernel is C text of kagent's own."""
    return task.kernel.packed is not None and task.kernel.source is not None


@dataclass
class Slots:
    """A task's stretch of the table.

    Attributes
    ----------
    first
        Number of its first slot; the arguments follow in order.
    pointers
        Name, slot and tensor of each tensor argument.
    report
        Slot of what the kernel reports, or None for one that reports nothing.
    """

    first: int
    pointers: list[tuple[str, int, TensorSpec]] = field(default_factory=list)
    report: int | None = None


class TranslationUnit:
    """Collects tasks and runs, and gives their text.

    Attributes
    ----------
    values
        The table's contents, addresses left 0.
    slots
        By task id.
    """

    def __init__(self) -> None:
        self.values: list[int] = []
        self.slots: dict[int, Slots] = {}
        self._kernels: dict[str, str] = {}
        self._calls: dict[int, str] = {}
        self._runs: list[tuple[str, list[int]]] = []

    def add(self, task: KernelTask) -> Slots:
        """Give a task its stretch of the table."""
        source = task.kernel.source or ""
        self._kernels.setdefault(task.kernel.name, without_comments(source))
        slots = self.slots[task.id] = Slots(len(self.values))
        passed = [self._argument(arg, slots) for arg in task.args]
        if reports(source):
            slots.report = len(self.values)
            self.values.append(0)
            passed.append(f"a + {slots.report - slots.first}")
        self._calls[task.id] = f"{task.kernel.name}({', '.join(passed)});"
        return slots

    def add_run(self, tasks: Sequence[KernelTask]) -> str:
        """Return the name of a function that runs some tasks, which have their stretches one after the other."""
        name = f"run_{len(self._runs)}"
        self._runs.append((name, [task.id for task in tasks]))
        return name

    @property
    def run_names(self) -> list[str]:
        """Names of the runs' functions."""
        return [name for name, _ in self._runs]

    @property
    def kernel_count(self) -> int:
        """Number of different kernels."""
        return len(self._kernels)

    def text(self) -> PiecedText:
        """Return the unit, without the preamble. Each kernel is a piece, the runs are the last one."""
        kernels = [_HEAD.sub(f"{OWN} void ", source, count=1) for source in self._kernels.values()]
        declared = [source.partition("{")[0].rstrip() + ";" for source in kernels]
        return PiecedText("\n".join(declared), (*kernels, self._text_of_runs()))

    def _text_of_runs(self) -> str:
        lines = []
        for name, tasks in self._runs:
            base = self.slots[tasks[0]].first
            lines.append(f"void {name}(i64 *t) {{")
            for task in tasks:
                shift = self.slots[task].first - base
                lines.append(f"    {{ i64 *const a = t + {shift}; {self._calls[task]} }}")
            lines.append("}")
        return "\n".join(lines)

    def _argument(self, arg: PackedArg, slots: Slots) -> str:
        slot = len(self.values)
        if isinstance(arg.value, TensorSpec):
            slots.pointers.append((arg.name, slot, arg.value))
            self.values.append(0)
            return f"({(arg.type or '').replace('restrict', '').strip()})a[{slot - slots.first}]"
        self.values.append(int(arg.value))
        return f"a[{slot - slots.first}]"


def reports(source: str) -> bool:
    """Whether a kernel's last parameter takes what it reports."""
    return f"i64 *{REPORT})" in without_comments(source).partition("{")[0]


def without_comments(source: str) -> str:
    """Return a kernel's text without the comments, which say where in the user's program it comes from."""
    head = _HEAD.search(source)
    if head is None:
        raise ValueError(f"no kernel in {source!r}")
    return source[head.start() :]
