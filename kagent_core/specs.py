"""The values that flow through kagent: frozen, comparable, printable, and free of torch.

Every stage takes some of these and returns others; none of them refers to a tensor, a driver or a plugin.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kagent_core.errors import DeviceError
from kagent_core.runs import byte_runs
from kagent_core.layout import ANY_STRIDES, Layout

_SHORT_NAMES = {
    "bool": "b8",
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex32": "c32",
    "complex64": "c64",
    "complex128": "c128",
}


@dataclass(frozen=True, slots=True)
class DType:
    """An element type, by PyTorch's name for it (``"float32"``), with its size in bytes."""

    name: str
    itemsize: int

    @property
    def short(self) -> str:
        """The name used in dumps: ``f32``, ``bf16``, ``i64``."""
        return _SHORT_NAMES.get(self.name, self.name)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Device:
    """A place where kernels run: ``cuda:0``, ``opencl:1``, or ``cpu`` for a type that has one device only.

    Examples
    --------
    >>> Device.parse("opencl:1")
    Device(type='opencl', index=1)
    >>> str(Device("cpu"))
    'cpu'
    """

    type: str
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read ``type`` or ``type:index``; anything else is a `DeviceError`."""
        match = re.fullmatch(r"([a-z][a-z0-9_]*)(?::(\d+))?", text)
        if match is None:
            raise DeviceError(
                f"'{text}' is not a device name",
                hint="write the device's type, or type:index, such as 'cpu' or 'opencl:0'",
            )
        return cls(match[1], None if match[2] is None else int(match[2]))

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a plugin tells about one of its devices, whether or not it can be used here.

    Attributes
    ----------
    device
        How users name it.
    name
        The hardware's own name.
    reason
        None when the device can be opened, else why not and what would help.
    memory_nbytes
        Memory that kernels can use, in bytes; 0 when unknown.
    max_threads_per_block
        Most threads (work-items) in one block (work-group).
    shared_nbytes
        Shared (local) memory that one block can have, in bytes.
    max_parameters
        Most parameters that one kernel can take.
    max_registers
        32-bit registers that one thread can have; 0 when unknown.
    max_grid
        Most blocks of one launch in x, y and z.
    emulated
        True when no such hardware is involved.
    plugin
        The distribution that brings the device; filled in by the core.
    details
        Anything else worth printing, such as a driver's version.
    """

    device: Device
    name: str
    reason: str | None = None
    memory_nbytes: int = 0
    max_threads_per_block: int = 1
    shared_nbytes: int = 0
    max_parameters: int = 128
    max_registers: int = 0
    max_grid: tuple[int, int, int] = (2**31 - 1, 2**31 - 1, 2**31 - 1)
    emulated: bool = False
    plugin: str = ""
    details: tuple[tuple[str, str], ...] = ()

    @property
    def available(self) -> bool:
        """Whether the device can be opened on this machine."""
        return self.reason is None


@dataclass(frozen=True, slots=True)
class MemRange:
    """Bytes of one buffer, from `offset`, that a task reads or writes."""

    buffer: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First byte past the range."""
        return self.offset + self.nbytes

    def overlaps(self, other: MemRange) -> bool:
        """Whether the two ranges share a byte. A range without bytes overlaps nothing."""
        return (
            self.buffer == other.buffer
            and self.nbytes > 0
            and other.nbytes > 0
            and self.offset < other.end
            and other.offset < self.end
        )

    def __str__(self) -> str:
        return f"b{self.buffer}[{self.offset}:{self.end}]"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data: where its elements lie in which buffer.

    Attributes
    ----------
    dtype
        Element type.
    shape, strides
        In elements, as PyTorch gives them.
    storage_offset
        Of the first element from the start of the buffer, in elements of `dtype`.
    buffer
        Number of the `BufferSpec` in the program.
    conj, neg
        PyTorch's lazy conjugation and negation bits: a reader must apply them.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    buffer: int
    conj: bool = False
    neg: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Elements from the first to the last one that the tensor touches, both included; 0 when empty."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def range(self) -> MemRange:
        """The bytes from the tensor's first to its last one."""
        itemsize = self.dtype.itemsize
        return MemRange(self.buffer, self.storage_offset * itemsize, self.span * itemsize)

    @property
    def ranges(self) -> tuple[MemRange, ...]:
        """The bytes that the tensor touches, exactly; `range` alone for one of very many pieces (`byte_runs`)."""
        if self.is_contiguous:
            return (self.range,)
        first = self.storage_offset * self.dtype.itemsize
        runs = byte_runs(self.shape, self.strides, self.dtype.itemsize)
        return tuple(MemRange(self.buffer, first + offset, nbytes) for offset, nbytes in runs)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps.

        As in PyTorch, dimensions of size 1 do not count, and a tensor without elements is contiguous.
        """
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def __str__(self) -> str:
        bits = ("*" if self.conj else "") + ("-" if self.neg else "")
        return f"{bits}{self.dtype.short}[{', '.join(map(str, self.shape))}]"


class BufferKind(Enum):
    """Who owns a buffer and how long it lives."""

    INPUT = "input"  # the caller's; bound on every call
    CONSTANT = "constant"  # belongs to the captured graph
    INTERMEDIATE = "intermediate"  # lives within one call, in the plan's arena
    OUTPUT = "output"  # made anew on every call and given to the caller
    MIRROR = "mirror"  # a copy of another buffer on another device


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One piece of memory of a program.

    Attributes
    ----------
    id
        Its number, which `TensorSpec.buffer` refers to.
    nbytes
        Bytes that the program touches, counted from the buffer's start.
    kind
        Who owns it.
    device
        Where it lives; None means host memory that the caller or the graph owns.
    source
        Position among the graph's inputs or constants; the mirrored buffer's id for a mirror; else None.
    """

    id: int
    nbytes: int
    kind: BufferKind
    device: Device | None = None
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where in the user's program an operator comes from: a Python stack, innermost frame last."""

    stack: str = ""

    @property
    def line(self) -> str | None:
        """``file:number: code`` of the innermost frame, or None when the stack is unknown."""
        frame = r'File "([^"]+)", line (\d+), in [^\n]*(?:\n(?![ \t]*File ")[ \t]+([^\n]+))?'
        frames = re.findall(frame, self.stack)
        if not frames:
            return None
        path, number, code = frames[-1]
        return f"{path}:{number}: {code.strip()}" if code else f"{path}:{number}"


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an operator.

    Attributes
    ----------
    id
        Position in the program.
    name
        A readable, unique name, such as ``addmm_3``.
    signature
        The exact ATen overload, such as ``aten::add.Tensor``.
    arguments
        Values by the schema's argument names, in the schema's order, only those that were given. A tensor is
        a `TensorSpec`; lists are tuples; dtypes, devices and the like are torch's own objects.
    inputs
        Every tensor among the arguments, those that are written included.
    outputs
        Every tensor that the call writes: arguments written in place, then results in new buffers.
    results
        What the call returns, flattened: a spec per tensor (it may alias an input), None for a missing one.
    provenance
        Line of the user's program.
    random
        Whether the call draws from the random number generator.
    overload
        torch's ``OpOverload``, for devices that run PyTorch's own kernels.
    inserted
        Why kagent added the call, for one that is not in the user's program; else None.
    """

    id: int
    name: str
    signature: str
    arguments: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    results: tuple[TensorSpec | None, ...]
    provenance: Provenance = Provenance()
    random: bool = False
    overload: Any = field(default=None, repr=False, compare=False)
    inserted: str | None = None

    @property
    def fresh_results(self) -> tuple[TensorSpec, ...]:
        """Results that lie in buffers of their own, in order."""
        given = {spec.buffer for spec in self.inputs}
        return tuple(spec for spec in self.results if spec is not None and spec.buffer not in given)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={format_value(value)}" for name, value in self.arguments.items())
        made = ", ".join("None" if spec is None else str(spec) for spec in self.results)
        return f"{self.name}: {self.signature}({given}) -> ({made})"


def format_value(value: Any) -> str:
    """Return an argument as one short line of text."""
    if isinstance(value, tuple):
        return f"[{', '.join(format_value(item) for item in value)}]"
    return str(value) if isinstance(value, TensorSpec) else repr(value)


@dataclass(frozen=True, slots=True)
class InputRef:
    """A program output that is one of the inputs itself, by position."""

    index: int


@dataclass(frozen=True, slots=True)
class Program:
    """A captured graph for one set of shapes: operator calls in a valid order.

    Attributes
    ----------
    calls
        The operators. Views are not among them: they are specs on their base's buffer.
    buffers
        Every piece of memory, by id.
    inputs
        A spec per tensor input, the value itself for an integer input.
    outputs
        A spec per tensor output, an `InputRef` where an input is returned as it is, else the value itself.
    constants
        A spec per constant of the graph, each on a buffer of its own.
    anchored
        Inputs whose buffer begins with their storage rather than with their first element, because the program
        addresses them absolutely; it holds for one storage offset of theirs only.
    name
        For logs and dumps.
    """

    calls: tuple[OpCall, ...]
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    constants: tuple[TensorSpec, ...] = ()
    anchored: frozenset[int] = frozenset()
    name: str = "program"


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a kernel is launched.

    Attributes
    ----------
    grid
        Blocks (work-groups) in x, y and z.
    block
        Threads (work-items) of a block in x, y and z.
    shared_nbytes
        Dynamic shared (local) memory per block, in bytes.
    """

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_nbytes: int = 0

    @property
    def threads_per_block(self) -> int:
        """Product of `block`."""
        return math.prod(self.block)

    def __str__(self) -> str:
        shared = f" + {self.shared_nbytes} B shared" if self.shared_nbytes else ""
        return f"grid {self.grid} x block {self.block}{shared}"


class Access(Enum):
    """What a kernel does with a tensor parameter."""

    IN = "in"
    OUT = "out"
    INOUT = "inout"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel's prototype.

    Attributes
    ----------
    name
        The ATen argument that it carries (``self``, ``alpha``), ``out`` (``out1``, ...) for a result, or a
        derived value.
    type
        Its C type: ``const float*``, ``int64_t``, ``double``, ``int64_t[8]`` for a struct of one such array.
        ``void`` says that the kernel does without the argument.
    access
        For pointers, what the kernel does with the tensor. None leaves it to the type: a pointer to const is
        read; another one is written, and read too where it carries an argument.
    derived
        Expression over arguments and results that gives the value, such as ``self.shape[1]``.
    optional
        Whether a pointer may be null, for a tensor that was not given.
    """

    name: str
    type: str
    access: Access | None = None
    derived: str | None = None
    optional: bool = False


DEFAULT_SIGNATURE = "default"
"""Signature of a kernel that takes any operator for which a device has nothing else."""


@dataclass(frozen=True, slots=True)
class KernelDescriptor:
    """What a kernel registry holds.

    Attributes
    ----------
    signature
        The exact overload that the kernel computes; `DEFAULT_SIGNATURE` for one that takes any operator for which
        there is nothing else. May be left empty where `fuses` says what the kernel computes.
    name
        Name of the kernel, unique among those with the same signature on a device.
    function
        A callable kernel, for devices whose kernels are called rather than compiled.
    source
        Source text in the device's kernel language.
    parameters
        The prototype, in order. Empty for a callable that takes the operator's own arguments.
    dtypes
        Names of the dtypes that its tensors may have; None accepts all.
    layout
        What memory layouts it takes, for every tensor that `layouts` does not name.
    layouts
        Layouts of single tensors, by ATen argument name; results are ``out``, or ``out0``, ``out1``, ... when there
        are several. Can be given as a mapping.
    lazy_bits
        Whether it reads tensors with PyTorch's lazy conjugation and negation bits right.
    allocates
        True when the kernel allocates its results itself and returns them, as a library's functional call
        does.
    priority
        The highest one that accepts the call wins.
    origin
        Who registered it and where, for error messages; the registry fills in file and line when it is empty.
    fuses
        For a fused kernel, the signatures of the operators that it computes, in order.
    """

    signature: str
    name: str
    function: Callable[..., Any] | None = field(default=None, compare=False)
    source: str | None = None
    parameters: tuple[Parameter, ...] = ()
    dtypes: frozenset[str] | None = None
    layout: Layout = ANY_STRIDES
    layouts: tuple[tuple[str, Layout], ...] | Mapping[str, Layout] = ()
    lazy_bits: bool = False
    allocates: bool = False
    priority: int = 0
    origin: str = ""
    fuses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # frozen, and so hashable, whatever collections were given
        if self.dtypes is not None:
            object.__setattr__(self, "dtypes", frozenset(self.dtypes))
        pairs = self.layouts.items() if isinstance(self.layouts, Mapping) else self.layouts
        object.__setattr__(self, "layouts", tuple(pairs))
        object.__setattr__(self, "fuses", tuple(self.fuses))
        if self.fuses and not self.signature:
            object.__setattr__(self, "signature", "+".join(self.fuses))

    def layout_of(self, tensor: str) -> Layout:
        """Return the layout that one tensor must have, given the name of its argument or result.

        Examples
        --------
        >>> from kagent_core.layout import CONTIGUOUS
        >>> kernel = KernelDescriptor("aten::mm", "mm", layouts={"mat2": CONTIGUOUS})
        >>> print(kernel.layout_of("mat2"), "and", kernel.layout_of("self"))
        contiguous tensors and tensors of any strides
        """
        return dict(self.layouts).get(tensor, self.layout)


@dataclass(frozen=True, slots=True)
class PackedArg:
    """One packed argument: a tensor's place in memory, or a value.

    Attributes
    ----------
    name
        The kernel parameter that it fills.
    value
        A `TensorSpec`, a scalar, or a tuple of either.
    access
        What the kernel does with the tensors in `value`; None when there are none.
    keyword
        Whether a callable kernel takes it by name.
    type
        C type of the parameter, where the kernel declares its parameters; `value` is then as the kernel sees it.
    data
        The value's bytes in that type; None for a tensor.
    """

    name: str
    value: Any
    access: Access | None = None
    keyword: bool = False
    type: str | None = None
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class KernelTask:
    """A self-contained unit of execution: everything that the executor needs to launch one kernel.

    Attributes
    ----------
    id
        Number of the task in its plan.
    kernel
        What to run.
    args
        Packed arguments, in the kernel's order.
    reads, writes
        Bytes that the task touches; a tensor written in place is in both.
    config
        Launch config; None when there is nothing to launch (a problem without elements).
    device
        Where it runs.
    priority
        Among tasks that are ready, the highest goes first.
    depends_on
        Ids of the tasks that must have finished before.
    calls
        The operators that the kernel computes.
    """

    id: int
    kernel: KernelDescriptor
    args: tuple[PackedArg, ...]
    reads: tuple[MemRange, ...]
    writes: tuple[MemRange, ...]
    config: LaunchConfig | None
    device: Device
    priority: int
    depends_on: tuple[int, ...]
    calls: tuple[OpCall, ...]

    @property
    def name(self) -> str:
        """Names of its operators, joined."""
        return "+".join(call.name for call in self.calls)

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """Tensors in buffers of their own that it makes, in order, without what stays inside a fused kernel."""
        written = {span.buffer for span in self.writes}
        return tuple(spec for call in self.calls for spec in call.fresh_results if spec.buffer in written)


@dataclass(frozen=True, slots=True)
class Placement:
    """The scheduler's answer for one operator: where it runs and why."""

    device: Device
    reason: str


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Operators that run as one kernel, by their ids.

    Attributes
    ----------
    calls
        Those that are this group's own: every operator is in exactly one group.
    recomputed
        Operators of other groups whose results this kernel computes again for itself rather than read them.
    inner
        Buffers of results that stay inside the kernel: it neither reads nor writes memory for them.
    """

    calls: tuple[int, ...]
    recomputed: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """Everything that the kernel computes, in the program's order where something is recomputed."""
        return tuple(sorted(self.calls + self.recomputed)) if self.recomputed else self.calls


@dataclass(frozen=True, slots=True)
class FusionDecision:
    """Why a pair of neighbouring operators did or did not fuse."""

    producer: int
    consumer: int
    fused: bool
    reason: str


@dataclass(frozen=True, slots=True)
class FusionPlan:
    """Result of the fusion analysis: every operator is in exactly one group."""

    groups: tuple[FusionGroup, ...] = ()
    decisions: tuple[FusionDecision, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """What the executor reports about one task of a run that is observed.

    Attributes
    ----------
    task
        The task.
    elapsed_ms
        Time that it took, in milliseconds, on the device's own clock where it has one.
    error
        None, or what went wrong.
    """

    task: KernelTask
    elapsed_ms: float
    error: Exception | None = None


def flatten_tensors(value: Any) -> Iterable[TensorSpec]:
    """Yield every `TensorSpec` in an argument value, in order.

    Examples
    --------
    >>> list(flatten_tensors((1, None, "x")))
    []
    """
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from flatten_tensors(item)
