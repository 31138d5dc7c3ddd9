"""Kernels and tasks: what runs, with what, and how it is launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kagent_core.layout import ANY_STRIDES, Layout
from kagent_core.specs.devices import Device
from kagent_core.specs.program import OpCall
from kagent_core.specs.tensors import MemRange, TensorSpec
from kagent_core.specs.tiles import Tiles, checked_tiles, spelled_tiles


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
        Dynamic shared (local) memory per block, in bytes; what the prototype's local parameters take among it.
    tiles
        For kernels that are generated with tiles: their sizes by name, as a mapping or as pairs. Sizes that are left
        out are the device's. With tiles alone, grid and block are what the device derives.

    Raises
    ------
    LaunchConfigError
        For a tile size that does not exist or cannot be.
    """

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_nbytes: int = 0
    tiles: Tiles | Mapping[str, int] = ()

    def __post_init__(self) -> None:
        if self.tiles != ():
            object.__setattr__(self, "tiles", checked_tiles(self.tiles))

    @property
    def has_only_tiles(self) -> bool:
        """Whether it says nothing about the launch: it has tiles, and grid, block and memory are the defaults."""
        return bool(self.tiles) and self == LaunchConfig(tiles=self.tiles)

    @property
    def threads_per_block(self) -> int:
        """Product of `block`."""
        return math.prod(self.block)

    def __str__(self) -> str:
        tiles = spelled_tiles(self.tiles) if self.tiles else ""
        if self.has_only_tiles:
            return tiles
        shared = f" + {self.shared_nbytes} B shared" if self.shared_nbytes else ""
        return f"grid {self.grid} x block {self.block}{shared}{f', {tiles}' if tiles else ''}"


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
        ``void`` says that the kernel does without the argument; ``local float*`` is memory that the threads of a
        block share, of as many elements as `derived` gives.
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
    packed
        For a kernel that was generated for one group of calls, its arguments, packed already.
    items
        For a generated kernel, its independent pieces of work, which its launch config follows from; None for others.
    reports
        Whether the kernel has one more parameter behind the packed ones: a pointer to an int64, 0 before the launch,
        that it sets to a number when an index or a divisor is an error of the user's.
    accepts
        Asked last whether the kernel takes a call: returns why not, or None. None takes every call that the other
        fields let through.
    threads
        For a generated kernel whose blocks share each of its `items`, how many threads a block must have; else None.
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
    packed: tuple[PackedArg, ...] | None = field(default=None, compare=False)
    items: int | None = field(default=None, compare=False)
    reports: bool = False
    accepts: Callable[[OpCall], str | None] | None = field(default=None, compare=False)
    threads: int | None = field(default=None, compare=False)

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
class LocalMemory:
    """Memory that the threads of a block share (CUDA: shared), which a kernel's prototype asks for.

    Attributes
    ----------
    type
        Of the parameter: ``local float*``.
    nbytes
        How much each block gets.
    """

    type: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.type} of {self.nbytes} B"


@dataclass(frozen=True, slots=True)
class PackedArg:
    """One packed argument: a tensor's place in memory, or a value.

    Attributes
    ----------
    name
        The kernel parameter that it fills.
    value
        A `TensorSpec`, a scalar, or a tuple of either; or a `LocalMemory`.
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
