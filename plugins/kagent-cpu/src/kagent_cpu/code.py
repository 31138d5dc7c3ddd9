"""A segment as the source of one Python function: straight-line calls of kernels, with nothing to look up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from kagent_core.capture.schemas import torch_dtype
from kagent_core.device import Segment
from kagent_core.specs import Access, KernelTask, PackedArg, TensorSpec, flatten_tensors
from kagent_cpu.aten import AtenKernel
from kagent_cpu.source import SourceKernel, values_of
from kagent_cpu.unit import TranslationUnit, is_generated

_PLAIN = (int, bool, str, type(None))
_FINISHED = "finished"


@dataclass
class SegmentSource:
    """Source of a segment's function, and what its names stand for.

    Attributes
    ----------
    lines
        The function ``replay(env)``; line n of the source is ``lines[n - 1]``.
    observed_lines
        The same, with a call of ``finished(position, [(argument, tensor), ...])`` after each task.
    constants
        Kernels and values by name.
    planned
        Name of each tensor that lies in the arena, by its spec.
    line_tasks
        Position of the task that each line of `lines` (or `observed_lines`) belongs to, by line number.
    unit
        The generated kernels. Its runs are functions of the same names; ``table`` is its table, ``table_at`` the
        table's address.
    addresses
        (slot, buffer, byte offset) of each argument in the arena.
    steady
        The same of each argument in a buffer that is bound; the offset is from the address of its tensor.
    """

    lines: list[str] = field(default_factory=list)
    observed_lines: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    planned: dict[TensorSpec, str] = field(default_factory=dict)
    line_tasks: dict[int, int] = field(default_factory=dict)
    observed_line_tasks: dict[int, int] = field(default_factory=dict)
    unit: TranslationUnit = field(default_factory=TranslationUnit)
    addresses: list[tuple[int, int, int]] = field(default_factory=list)
    steady: list[tuple[int, int, int]] = field(default_factory=list)


class SegmentWriter:
    """Writes a segment down.

    Tensors in the arena are made once per instance and are globals of the function. Tensors on memory that changes
    from call to call (inputs, results that the caller keeps, results that a kernel allocates) are locals, made where
    they are first needed and dropped after their last use.

    Parameters
    ----------
    segment
        What to write.
    sources
        The kernels that are C text which somebody wrote, by task id.
    """

    def __init__(self, segment: Segment, sources: Mapping[int, SourceKernel] = MappingProxyType({})) -> None:
        self._segment = segment
        self._sources = sources
        self._source = SegmentSource()
        self._locals: dict[TensorSpec, str] = {}
        self._bases: dict[int, tuple[str, TensorSpec]] = {}
        self._names: dict[int, str] = {}
        self._body: list[tuple[str, int, bool | None]] = []
        self._task = 0
        self._views = 0
        self._planned_names: dict[int, str] = {}
        self._results = [list(task.results) for task in segment.tasks]
        self._into_arena = [
            self._writes_into_arena(task, results) for task, results in zip(segment.tasks, self._results, strict=True)
        ]
        made = zip(self._results, self._into_arena, strict=True)
        self._in_arena = {spec.buffer for results, into_arena in made if into_arena for spec in results}
        # a generated kernel writes each of its results wherever that is to be
        generated = (task for task in segment.tasks if is_generated(task))
        self._in_arena |= {s.buffer for task in generated for s in task.results if s.buffer in segment.offsets}

    def write(self) -> SegmentSource:
        """Return the source."""
        last_use = self._last_uses()
        tasks = self._segment.tasks
        position = 0
        while position < len(tasks):
            end = position
            while end < len(tasks) and is_generated(tasks[end]):
                end += 1
            if end > position:
                self._write_run(position, end)
            else:
                end = position + 1
                self._task = position
                self._write_task(tasks[position])
                self._emit(f"{_FINISHED}({position}, {self._tensors_of(tasks[position])})", observed=True)
            dead = set().union(*(last_use.get(p, set()) for p in range(position, end)))
            names = self._forget(dead) if dead else []
            if names:
                self._emit(f"del {', '.join(names)}")
            position = end
        for buffer in sorted(self._segment.exports):
            self._emit(f"env[{buffer}] = {self._bases[buffer][0]}")
        self._assemble()
        return self._source

    # -- generated kernels

    def _write_run(self, begin: int, end: int) -> None:
        """Write consecutive tasks of generated kernels: results made anew, addresses that change, one call."""
        unit, tasks = self._source.unit, self._segment.tasks[begin:end]
        written: dict[str, str] = {}
        for self._task, task in enumerate(tasks, begin):
            fresh = [s for s in task.results if s.buffer not in self._in_arena and s.buffer not in self._bases]
            self._allocate(fresh)
            for _, slot, spec in unit.add(task).pointers:
                nbytes = spec.storage_offset * spec.dtype.itemsize
                if spec.buffer in self._in_arena:
                    self._source.addresses.append((slot, spec.buffer, nbytes))
                    continue
                if spec.buffer in self._segment.steady:
                    base = self._segment.bases[spec.buffer]
                    self._source.steady.append((slot, spec.buffer, nbytes - base.storage_offset * base.dtype.itemsize))
                    continue
                name, base = self._base(spec.buffer)
                if name not in written:
                    written[name] = f"a_{name}"
                    self._emit(f"{written[name]} = {name}.data_ptr()")
                shift = nbytes - base.storage_offset * base.dtype.itemsize
                self._emit(f"table[{slot}] = {written[name]}" + (f" + {shift}" if shift else ""))
        self._task = begin
        names = ", ".join(task.name for task in tasks)
        self._emit(f"{self._run_call(tasks)}  # {names}", observed=False)
        for self._task, task in enumerate(tasks, begin):
            slots = unit.slots[task.id]
            self._emit(f"{self._run_call([task])}  {self._comment(task)}", observed=True)
            if slots.report is not None:
                self._emit(f"if table[{slots.report}]: report({self._task})")
            places = ", ".join(f"({name!r}, table[{slot}])" for name, slot, _ in slots.pointers)
            self._emit(f"{_FINISHED}({self._task}, [{places}])", observed=True)

    def _run_call(self, tasks: Sequence[KernelTask]) -> str:
        unit = self._source.unit
        first = unit.slots[tasks[0].id].first * 8
        return f"{unit.add_run(tasks)}(table_at + {first})"

    # -- one task

    def _write_task(self, task: KernelTask) -> None:
        kernel = task.kernel.function
        for arg in task.args:
            if arg.access is not Access.OUT:
                for spec in flatten_tensors(arg.value):
                    self._tensor(spec)
        results = self._results[self._task]
        if task.id in self._sources:
            self._write_source_call(task, results)
            return
        if self._into_arena[self._task]:
            variant = kernel.into if isinstance(kernel, AtenKernel) else kernel
            self._emit(f"{self._constant(variant, task)}({self._arguments(task.args)})  {self._comment(task)}")
            return
        given = [arg for arg in task.args if arg.access is not Access.OUT]
        if results and not task.kernel.allocates and not isinstance(kernel, AtenKernel):
            self._write_into_new(task, results)
            return
        variant = kernel.call if isinstance(kernel, AtenKernel) else kernel
        call = f"{self._constant(variant, task)}({self._arguments(given)})"
        self._emit(f"{self._targets(task, results, call)}  {self._comment(task)}")
        given_tensors = ""
        if not isinstance(kernel, AtenKernel):  # a user's kernel may hand back what it was given
            tensors = [self._tensor(spec) for arg in given for spec in flatten_tensors(arg.value)]
            given_tensors = f", [{', '.join(tensors)}]"
        for spec in self._firsts(results):
            name, base = self._bases[spec.buffer]
            as_expected = f"if {self._differs(name, base)}: " if isinstance(kernel, AtenKernel) else ""
            self._emit(f"{as_expected}{name} = conform({name}, {self._constant(_geometry(base))}{given_tensors})")

    def _differs(self, name: str, spec: TensorSpec) -> str:
        """Return whether a result of ATen's is one for `conform`: that it is not takes half the time to see here."""
        checks = [
            f"{name} is None",
            f"{name}.shape != {spec.shape}",
            f"{name}.stride() != {spec.strides}",
            f"{name}.dtype is not {self._constant(torch_dtype(spec.dtype))}",
            f"{name}.storage_offset() != {spec.storage_offset}",
        ]
        if self._segment.arena_nbytes:
            checks.append(f"0 <= {name}.data_ptr() - arena_at < {self._segment.arena_nbytes}")
        return " or ".join(checks)

    def _writes_into_arena(self, task: KernelTask, results: list[TensorSpec]) -> bool:
        """Whether every result of a task has its place in the arena, and its kernel writes there."""
        if not results or task.kernel.allocates:
            return False
        return all(spec.buffer in self._segment.offsets for spec in results)

    def _tensors_of(self, task: KernelTask) -> str:
        """Names of a task's tensors by argument, for observers."""
        named = [(arg.name, spec) for arg in task.args for spec in flatten_tensors(arg.value)]
        named += [("result", spec) for spec in self._results[self._task]]
        pairs = {f"({name!r}, {self._tensor(spec)})": None for name, spec in named}
        return f"[{', '.join(pairs)}]"

    def _write_into_new(self, task: KernelTask, results: list[TensorSpec]) -> None:
        """A user's kernel that fills results which outlive the call: give it new ones."""
        self._allocate(results)
        self._emit(f"{self._constant(task.kernel.function, task)}({self._arguments(task.args)})  {self._comment(task)}")

    def _write_source_call(self, task: KernelTask, results: list[TensorSpec]) -> None:
        """C text that somebody wrote: one call, with the addresses of its tensors."""
        if not self._into_arena[self._task]:
            self._allocate(results)
        loaded = self._sources[task.id]
        values = values_of(task, loaded)
        passed = [f"{self._tensor(v)}.data_ptr()" if isinstance(v, TensorSpec) else self._value(v) for v in values]
        self._emit(f"{self._constant(loaded.function, task)}({', '.join(passed)})  {self._comment(task)}")

    def _allocate(self, results: list[TensorSpec]) -> None:
        for spec in self._firsts(results):
            name = self._new_base(spec)
            nbytes = self._segment.buffers[spec.buffer].nbytes
            if nbytes <= spec.range.nbytes and not (spec.storage_offset or spec.conj or spec.neg):
                dtype = self._constant(torch_dtype(spec.dtype))
                self._emit(f"{name} = empty_strided({spec.shape}, {spec.strides}, {dtype})")
            else:
                self._emit(f"{name} = empty_like_spec({self._constant(spec)}, {nbytes})")

    def _targets(self, task: KernelTask, results: list[TensorSpec], call: str) -> str:
        """Return the statement that calls a kernel which allocates, and takes its results apart."""
        # a fused kernel returns what leaves it
        returned = task.calls[0].results if len(task.calls) == 1 else task.results
        if not results:
            return call
        names: list[str] = []
        seen: set[int] = set()
        fresh = {id(spec) for spec in results}
        for spec in returned:
            if spec is None or id(spec) not in fresh or spec.buffer in seen:
                names.append("_")
                continue
            seen.add(spec.buffer)
            names.append(self._new_base(spec))
        if len(returned) == 1 and not _returns_list(task):
            return f"{names[0]} = {call}"
        nested = "flatten" if _returns_list(task) else ""
        taken = f"{nested}({call})" if nested else call
        return f"{', '.join(names)}{',' if len(names) == 1 else ''} = {taken}"

    def _firsts(self, results: list[TensorSpec]) -> list[TensorSpec]:
        first: dict[int, TensorSpec] = {}
        for spec in results:
            first.setdefault(spec.buffer, spec)
        return list(first.values())

    def _new_base(self, spec: TensorSpec) -> str:
        name = f"r{spec.buffer}"
        self._bases[spec.buffer] = (name, spec)
        self._locals[spec] = name
        return name

    # -- arguments

    def _arguments(self, args: list[PackedArg] | tuple[PackedArg, ...]) -> str:
        return ", ".join(
            f"{arg.name}={self._value(arg.value)}" if arg.keyword else self._value(arg.value) for arg in args
        )

    def _value(self, value: Any) -> str:
        if isinstance(value, TensorSpec):
            return self._tensor(value)
        if isinstance(value, tuple):
            return f"[{', '.join(self._value(item) for item in value)}]"
        if isinstance(value, _PLAIN) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _tensor(self, spec: TensorSpec) -> str:
        if spec.buffer in self._in_arena:
            known = self._planned_names.get(id(spec))  # the segment keeps its specs alive, and hashing one is slow
            if known is None:
                known = self._source.planned.setdefault(spec, f"t{len(self._source.planned)}")
                self._planned_names[id(spec)] = known
            return known
        if spec in self._locals:
            return self._locals[spec]
        name, base = self._base(spec.buffer)
        if spec == base:
            self._locals[spec] = name
            return name
        view = f"v{self._views}"
        self._views += 1
        if spec.dtype == base.dtype and spec.conj == base.conj and spec.neg == base.neg:
            shift = spec.storage_offset - base.storage_offset
            self._emit(f"{view} = reinterpret({name}, {spec.shape}, {spec.strides}, {shift})")
        else:
            self._emit(f"{view} = view_of({name}, {self._constant(base)}, {self._constant(spec)})")
        self._locals[spec] = view
        return view

    def _base(self, buffer: int) -> tuple[str, TensorSpec]:
        if buffer not in self._bases:
            name = f"b{buffer}"
            self._emit(f"{name} = env[{buffer}]")
            self._bases[buffer] = (name, self._segment.bases[buffer])
        return self._bases[buffer]

    def _constant(self, value: Any, task: KernelTask | None = None) -> str:
        key = id(value)
        if key not in self._names:
            label = "c" if task is None else "k_" + "".join(c if c.isalnum() else "_" for c in task.kernel.signature)
            self._names[key] = f"{label}_{len(self._source.constants)}"
            self._source.constants[self._names[key]] = value
        return self._names[key]

    # -- lifetimes and lines

    def _last_uses(self) -> dict[int, set[int]]:
        """For each task, the buffers that no later task touches."""
        last: dict[int, int] = {}
        for position, task in enumerate(self._segment.tasks):
            for span in (*task.reads, *task.writes):
                last[span.buffer] = position
        dead: dict[int, set[int]] = {}
        allocated = {spec.buffer for results in self._results for spec in results}
        for buffer, position in last.items():
            if buffer in allocated and buffer not in self._segment.exports:
                dead.setdefault(position, set()).add(buffer)
        return dead

    def _forget(self, buffers: set[int]) -> list[str]:
        """Drop the names of tensors on buffers that no later task touches."""
        specs = [spec for spec in self._locals if spec.buffer in buffers]
        names = sorted({self._locals.pop(spec) for spec in specs})
        for buffer in buffers:
            base = self._bases.pop(buffer, None)
            if base is not None and base[0] not in names:
                names.append(base[0])
        return names

    def _emit(self, line: str, observed: bool | None = None) -> None:
        """Add a line to both variants, or only to the one that is observed, or is not."""
        self._body.append((line, self._task, observed))

    def _comment(self, task: KernelTask) -> str:
        made = ", ".join(str(spec) for spec in (task.calls[0].outputs if len(task.calls) == 1 else task.results))
        line = task.calls[-1].provenance.line
        return f"# {task.name}: {made}" + (f"  <- {line}" if line else "")

    def _assemble(self) -> None:
        source = self._source
        source.lines.append("def replay(env):")
        source.observed_lines.append("def replay_observed(env, finished):")
        for line, task, observed in self._body:
            if observed is not False:
                source.observed_lines.append(f"    {line}")
                source.observed_line_tasks[len(source.observed_lines)] = task
            if observed is not True:
                source.lines.append(f"    {line}")
                source.line_tasks[len(source.lines)] = task
        source.lines.append("    return")
        source.observed_lines.append("    return")


def _geometry(spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...], TensorSpec]:
    return (spec.shape, spec.strides, spec)


def _returns_list(task: KernelTask) -> bool:
    """Whether the operator returns a list among its results, so that they must be flattened."""
    overload = task.calls[0].overload if len(task.calls) == 1 else None
    return overload is not None and any("List" in str(r.type) or "[]" in str(r.type) for r in overload._schema.returns)
