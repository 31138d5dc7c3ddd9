"""Running a segment on the CPU: its function, with memory of its own."""

from __future__ import annotations

import array
import ctypes
import functools
import linecache
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from kagent_core.capture.schemas import dtype_of, torch_dtype
from kagent_core.config import TRACE
from kagent_core.device import Environment, Observer, SealedSegment, Segment
from kagent_core.errors import KernelExecutionError
from kagent_core.execute.failure import as_eager_fails, kernel_failure, reported_error
from kagent_core.execute.host import empty_like_spec, view_of
from kagent_core.inspect.logs import get_logger
from kagent_core.native import Library, PiecedText
from kagent_core.specs import DType, KernelDescriptor, KernelTask, TaskFinished, TensorSpec
from kagent_cpu.code import SegmentSource, SegmentWriter
from kagent_cpu.source import SourceKernel, is_source
from kagent_cpu.unit import is_generated

log = get_logger("execute")

LoadUnit = Callable[[PiecedText], Library]
"""Compiles and loads the text of generated kernels."""

LoadSource = Callable[[KernelDescriptor], SourceKernel]
"""Compiles and loads a kernel of C text that somebody wrote."""

_BYTE = DType("uint8", 1)
_LARGEST_ITEM = 16  # bytes of a complex128
# without the dispatcher: a quarter and two fifths of the operators' time, the plan's numbers being right already
_reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
_empty_strided = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
_copy = torch.ops.aten.copy_.default._op


class CompiledSegment:
    """A segment's source, compiled: shared by every instance of the segment.

    Parameters
    ----------
    segment
        What to run.
    load
        Compiles and loads the text of generated kernels; needed only where there are any.
    load_source
        The same for kernels of C text that somebody wrote.
    """

    def __init__(self, segment: Segment, load: LoadUnit | None = None, load_source: LoadSource | None = None) -> None:
        self.segment = segment
        loaded = {task.id: _loaded(task, load_source) for task in segment.tasks if is_source(task.kernel)}
        self.source: SegmentSource = SegmentWriter(segment, loaded).write()
        self.runs = self._load_runs(load)
        self.filename = f"<kagent {segment.name} on {segment.device} {id(self):x}>"
        weakref.finalize(self, _forget_source, self.filename).atexit = False
        self.code = self._compile(self.source.lines, self.filename)
        log.debug("%s as one function:\n%s", segment.name, "\n".join(self.source.lines))

    def _load_runs(self, load: LoadUnit | None) -> dict[str, Callable[[int], None]]:
        unit = self.source.unit
        if not unit.slots:
            return {}
        if load is None:
            raise TypeError(f"{self.segment.name} has generated kernels, and there is no compiler for them")
        library = load(unit.text())
        log.debug(
            "%s: %d generated kernels in %d tasks, %s",
            self.segment.name,
            unit.kernel_count,
            len(unit.slots),
            "from the cache" if library.from_cache else f"compiled in {library.compile_ms:.0f} ms",
        )
        return {name: library.function(name) for name in unit.run_names}

    @functools.cached_property
    def observed_code(self) -> CodeType:
        """The variant that reports every task; compiled when first asked for."""
        return self._compile(self.source.observed_lines, self.filename + " observed")

    @staticmethod
    def _compile(lines: list[str], filename: str) -> CodeType:
        text = "\n".join(lines) + "\n"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        return compile(text, filename, "exec")


def _loaded(task: KernelTask, load_source: LoadSource | None) -> SourceKernel:
    if load_source is None:
        raise TypeError(f"kernel '{task.kernel.name}' is C text, and there is nothing to load it with")
    return load_source(task.kernel)


def _forget_source(filename: str) -> None:
    """Tracebacks need a segment's source for as long as it can run."""
    for name in (filename, filename + " observed"):
        linecache.cache.pop(name, None)


def _fills_new_memory() -> bool:
    """Whether new memory is to be NaN, so that what nobody writes is seen: a setting that Dynamo's guards watch."""
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return fills and torch.are_deterministic_algorithms_enabled()


def _filled_empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


class CpuSegment(SealedSegment):
    """One instance of a segment: its function and its arena.

    Parameters
    ----------
    compiled
        What to run.
    threads
        Threads that a kernel may use; None for what torch is set to.
    """

    def __init__(self, compiled: CompiledSegment, threads: int | None = None) -> None:
        self._segment = segment = compiled.segment
        self._threads = threads
        self._compiled = compiled
        source = compiled.source
        arena = torch.empty(max(segment.arena_nbytes, 1), dtype=torch.uint8, device="cpu")
        self._globals: dict[str, Any] = {
            "reinterpret": _reinterpret,
            "view_of": view_of,
            "empty_like_spec": empty_like_spec,
            "empty_strided": _filled_empty_strided if _fills_new_memory() else _empty_strided,
            "conform": _Conform(arena.data_ptr(), arena.data_ptr() + segment.arena_nbytes),
            "arena_at": arena.data_ptr(),
            "flatten": _flatten,
            **compiled.runs,
            **source.constants,
        }
        if source.unit.slots:
            table = array.array("q", source.unit.values)
            for slot, buffer, offset in source.addresses:
                table[slot] = arena.data_ptr() + segment.offsets[buffer] + offset
            # generated kernels know the arena by its address only: the table keeps it alive
            self._globals |= {"table": table, "table_at": table.buffer_info()[0], "arena": arena}
            self._globals["report"] = _Report(segment, source, table)
        homes: dict[int, torch.Tensor] = {}
        for spec, name in source.planned.items():
            if spec.buffer not in homes:
                homes[spec.buffer] = _home(arena, segment, spec.buffer)
            whole = TensorSpec(_BYTE, tuple(homes[spec.buffer].shape), (1,), 0, 0)
            self._globals[name] = view_of(homes[spec.buffer], whole, spec)
        self._replay = self._define(self._compiled.code, "replay")
        self.calls_torch = not all(is_generated(task) for task in segment.tasks)

    def bind(self, environment: Environment) -> None:
        """Write the addresses of steady tensors into the table."""
        addresses: dict[int, int] = {}
        for slot, buffer, nbytes in self._compiled.source.steady:
            if buffer not in addresses:
                addresses[buffer] = environment[buffer].data_ptr()
            self._globals["table"][slot] = addresses[buffer] + nbytes

    def run(self, environment: Environment) -> None:
        """Run every task in the calling thread."""
        try:
            # asking also makes torch tell OpenMP, in a thread where it has run nothing yet
            threads = torch.get_num_threads()
            if self._threads is None or self._threads == threads:
                self._replay(environment)
            else:
                self._run_with_threads(environment, self._threads)
        except KernelExecutionError:
            raise  # a generated kernel's report, told in full
        except Exception as error:
            task = self._failed_task(error, self._compiled.source.line_tasks)
            if task is None:
                raise
            raise kernel_failure(task, error) from error

    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """Run every task and report each with its time."""
        began = time.perf_counter()
        telling = False  # whether what fails is the observer, not a kernel

        def finished(position: int, tensors: list[tuple[str, torch.Tensor | int]]) -> None:
            nonlocal began, telling
            elapsed_ms = (time.perf_counter() - began) * 1e3
            task = self._segment.tasks[position]
            if log.isEnabledFor(TRACE):
                log.trace("%s: %s", task.name, ", ".join(f"{name}={_address(t):#x}" for name, t in tensors))
            telling = True
            observer(TaskFinished(task, elapsed_ms))
            telling = False
            began = time.perf_counter()

        replay = self._define(self._compiled.observed_code, "replay_observed")
        try:
            replay(environment, finished)
        except Exception as error:
            task = self._failed_task(error, self._compiled.source.observed_line_tasks)
            if task is None or telling:
                raise
            failure = error if isinstance(error, KernelExecutionError) else kernel_failure(task, error)
            observer(TaskFinished(task, (time.perf_counter() - began) * 1e3, failure))
            if failure is error:
                raise
            raise failure from error

    def close(self) -> None:
        """Let go of the arena."""
        self._globals.clear()

    def _run_with_threads(self, environment: Environment, threads: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            self._replay(environment)
        finally:
            torch.set_num_threads(before)

    def _define(self, code: CodeType, name: str) -> Any:
        namespace: dict[str, Any] = {}
        exec(code, self._globals, namespace)
        return namespace[name]

    def _failed_task(self, error: Exception, line_tasks: dict[int, int]) -> KernelTask | None:
        """Return the task that failed, which is known from the line of the segment's function."""
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename.startswith(self._compiled.filename):
                position = line_tasks.get(traceback.tb_lineno)
                if position is not None:
                    return self._segment.tasks[position]
            traceback = traceback.tb_next
        return None


def _address(tensor: torch.Tensor | int) -> int:
    return tensor if isinstance(tensor, int) else tensor.data_ptr()


class _Report:
    """Raises what a generated kernel reported. Holds the segment and the table, and not what runs them: a cycle."""

    def __init__(self, segment: Segment, source: SegmentSource, table: Any) -> None:
        self._segment = segment
        self._source = source
        self._table = table

    def __call__(self, position: int) -> None:
        """Raise as eager PyTorch does, and be ready for the next call."""
        task = self._segment.tasks[position]
        slots = self._source.unit.slots[task.id]
        code, self._table[slots.report] = self._table[slots.report], 0
        places = {spec: self._table[slot] for _, slot, spec in slots.pointers}

        def tensor_of(spec: TensorSpec) -> torch.Tensor:
            if spec not in places:  # the kernel had no use for its elements
                return torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu")
            memory = (ctypes.c_ubyte * max(spec.range.nbytes, 1)).from_address(places[spec])
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            return view_of(whole, TensorSpec(_BYTE, tuple(whole.shape), (1,), 0, 0), replace(spec, storage_offset=0))

        raise as_eager_fails(task, tensor_of, reported_error(code))


class _Conform:
    """Checks what kernels return. Holds the arena's bounds and not its segment, which would be a cycle."""

    def __init__(self, begin: int, end: int) -> None:
        self._bounds = (begin, end)

    def __call__(
        self, result: torch.Tensor | None, geometry: tuple[Any, Any, TensorSpec], given: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Return a kernel's result laid out as the program expects, on memory that nobody else writes.

        Capture's strides come from meta kernels. Where a kernel lays its result out otherwise, or hands back memory of
        the arena or of one of the tensors that it was `given`, the result is copied. Strides of dimensions of size 1
        lay nothing out: there the kernel's own stay, which are eager's.
        """
        shape, strides, spec = geometry
        if result is None:  # ATen's undefined tensor, as for a workspace that this call does not need
            if spec.numel:
                raise RuntimeError(f"the kernel returned None, expected {spec}")
            return empty_like_spec(spec, 0)
        if not isinstance(result, torch.Tensor):
            kind = type(result)
            named = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
            raise TypeError(f"the kernel returned a {named}, expected {spec}")
        address = result.data_ptr()
        if result.shape != shape or result.dtype is not torch_dtype(spec.dtype):
            came = f"{dtype_of(result.dtype).short}[{', '.join(map(str, result.shape))}]"
            raise RuntimeError(f"the kernel returned {came}, expected {spec}")
        if (
            (result.stride() == strides or _same_layout(shape, strides, result.stride()))
            and result.storage_offset() == spec.storage_offset
            and not self._bounds[0] <= address < self._bounds[1]
            and not (given and any(_share_storage(result, tensor) for tensor in given))
        ):
            return result
        laid_out = empty_like_spec(spec, 0)
        _copy(laid_out, result)
        return laid_out


def _share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _same_layout(shape: tuple[int, ...], strides: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return 0 in shape or all(a == b or size == 1 for size, a, b in zip(shape, strides, others, strict=True))


def _home(arena: torch.Tensor, segment: Segment, buffer: int) -> torch.Tensor:
    """Return a planned buffer's bytes as a tensor with a storage of its own, which keeps the arena alive.

    Some of ATen's kernels (``linalg_qr.out``) take results that share a storage for one and the same tensor; some
    (``slice_scatter``) want a storage of whole elements, even of an empty tensor.
    """
    begin, nbytes = segment.offsets[buffer], segment.buffers[buffer].nbytes
    part = arena[begin : begin + max(-(-nbytes // _LARGEST_ITEM) * _LARGEST_ITEM, _LARGEST_ITEM)]
    capsule = torch.utils.dlpack.to_dlpack(part)  # type: ignore[attr-defined]  # much faster than the protocol
    return torch.utils.dlpack.from_dlpack(capsule)


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flatten(item)]
    return [value]
