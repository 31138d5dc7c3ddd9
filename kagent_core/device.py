"""What a device brings: the contracts that a plugin implements.

A device *must* give a `Runtime` (six methods), a `KernelRegistry`, an `ArgumentPacker` and a
`LaunchConfigDeriver`. Everything marked *optional* has a default, and says what it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kagent_core.errors import KernelNotFoundError
from kagent_core.runs import byte_runs
from kagent_core.specs import (
    Access,
    BufferSpec,
    Device,
    DeviceInfo,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    OpCall,
    PackedArg,
    TaskFinished,
    TensorSpec,
)

if TYPE_CHECKING:
    from kagent_core.optimize.inference_graph import InferenceGraph
    from kagent_core.registry import KernelRegistry

CONTRACT_VERSION = 1
"""Version of the contract between the core and its plugins. A plugin states the one that it was written for."""

Environment = dict[int, Any]
"""One call's buffers by id: a torch tensor for host memory, a `Region` for device memory."""

Observer = Callable[[TaskFinished], None]
"""Called after each task of a run that is observed."""


@dataclass(frozen=True, slots=True)
class Region:
    """Device memory of one of a program's buffers: what `Runtime.allocate` returned, and where in it it begins."""

    buffer: Any
    byte_offset: int = 0


@dataclass(frozen=True, slots=True)
class PointerArg:
    """A tensor argument as a runtime sees it at launch: a buffer and where in it the tensor begins.

    Attributes
    ----------
    buffer
        What `Runtime.allocate` returned.
    byte_offset
        Of the tensor's first element.
    spec
        The tensor's dtype, shape and strides.
    access
        What the kernel declares to do with it.
    """

    buffer: Any
    byte_offset: int
    spec: TensorSpec
    access: Access = Access.IN

    def __str__(self) -> str:
        place = f"@{self.buffer:#x}" if isinstance(self.buffer, int) else ""
        return f"{self.access.value} {self.spec}{place}+{self.byte_offset}"

    @property
    def nbytes(self) -> int:
        """Bytes from the tensor's first to its last one."""
        return self.spec.span * self.spec.dtype.itemsize

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The bytes of the buffer that the tensor touches, as (offset, length)."""
        runs = byte_runs(self.spec.shape, self.spec.strides, self.spec.dtype.itemsize)
        return [(self.byte_offset + offset, length) for offset, length in runs]


@dataclass(frozen=True, slots=True)
class NamedArg:
    """An argument that a callable kernel takes by name, as the operator does: ``alpha`` of ``aten::add.Tensor``."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class ScalarArg:
    """A value as a runtime sees it at launch, for a kernel that declares its parameters.

    Its bytes lie in the plan's parameter buffer, where they stay until the plan is given up: a launch may read them
    later. A null pointer is a value of a pointer type whose bytes are zero.

    Attributes
    ----------
    type
        C type, such as ``int64_t``.
    data
        The bytes, read only.
    address
        Where they lie in host memory.
    decode
        From bytes to a Python value.
    """

    type: str
    data: memoryview
    address: int
    decode: Callable[[memoryview], Any]

    def __str__(self) -> str:
        return f"{self.type} {self.value}"

    @property
    def value(self) -> Any:
        """The value that the bytes stand for now."""
        return self.decode(self.data)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tasks of a plan on one device, in the order in which they run.

    Attributes
    ----------
    device
        Where they run.
    tasks
        Ready to launch.
    buffers
        Every buffer of the program, by id.
    offsets
        Byte offset in the device's arena of each intermediate buffer that is planned into it.
    arena_nbytes
        Size of that arena.
    exports
        Buffers made here that a later segment or the caller reads.
    bases
        By buffer, the spec of the tensor that an environment holds for it in host memory.
    name
        Of the program, for messages.
    in_place
        Buffers that are memory of torch's own tensors on the device: an environment holds their `Region`.
    steady
        Buffers of inputs that are the same tensors call after call, such as packed weights: `SealedSegment.bind`.
    """

    device: Device
    tasks: tuple[KernelTask, ...]
    buffers: tuple[BufferSpec, ...]
    offsets: Mapping[int, int] = field(default_factory=dict)
    arena_nbytes: int = 0
    exports: frozenset[int] = frozenset()
    bases: Mapping[int, TensorSpec] = field(default_factory=dict)
    name: str = "program"
    in_place: frozenset[int] = frozenset()
    steady: frozenset[int] = frozenset()


class SealedSegment(ABC):
    """A segment made ready to run many times. One instance is used by one thread at a time.

    Attributes
    ----------
    calls_torch
        Whether it calls PyTorch's operators or Python functions, which then run below autograd and autocast. Optional:
        by default it may.
    """

    calls_torch = True

    def bind(self, environment: Environment) -> None:
        """Note what depends on the tensors of `Segment.steady` alone, such as their addresses.

        Called before a run whenever these may be other tensors than at the run before, and at the first one. They
        are in the environment of every run, too. Optional: by default nothing.
        """

    @abstractmethod
    def run(self, environment: Environment) -> None:
        """Run every task. Reads and fills `environment` in place."""

    @abstractmethod
    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """Run every task and tell `observer` about each, with its time. May be slower than `run`."""

    def close(self) -> None:
        """Give back what the segment holds. Optional: by default nothing."""


def call_kernel(function: Callable[..., Any], args: Sequence[Any], convert: Callable[[Any], Any]) -> Any:
    """Call a kernel that is a Python callable as its operator is called: what goes by name, by name.

    For the `Runtime.launch` of a device whose kernels are callables.

    Parameters
    ----------
    function
        The kernel.
    args
        What `Runtime.launch` was given.
    convert
        Turns each argument into what the kernel takes, such as a `PointerArg` into an array on its memory.

    Examples
    --------
    >>> call_kernel(lambda x, *, alpha: x * alpha, [2, NamedArg("alpha", 3)], convert=lambda arg: arg)
    6
    """
    by_place = [convert(arg) for arg in args if not isinstance(arg, NamedArg)]
    by_name = {arg.name: convert(arg.value) for arg in args if isinstance(arg, NamedArg)}
    return function(*by_place, **by_name)


@dataclass(frozen=True, slots=True)
class Launch:
    """One of the launches that `Runtime.record` is given.

    Attributes
    ----------
    kernel, config, args
        As `Runtime.launch` takes them.
    after
        Positions of the launches that must have finished before this one starts; the others need no order.
    """

    kernel: Any
    config: LaunchConfig
    args: Sequence[Any]
    after: tuple[int, ...] = ()


class Recording(ABC):
    """Several launches that a device starts as one. Its methods are called as those of its runtime are."""

    @abstractmethod
    def start(self) -> None:
        """Start every launch, each after those that it must come after. Does not wait for them."""

    @abstractmethod
    def update(self, position: int, args: Sequence[Any]) -> None:
        """Give the launch at `position` other arguments, because memory of one has moved.

        Nothing is under way, but where `Runtime.before_torch` has returned True: then starts may be, which keep the
        arguments that they had.
        """

    def close(self) -> None:
        """Give back what the recording holds. Optional: by default nothing."""


class LaunchError(Exception):
    """What `Runtime.synchronize` raises when it knows which launch failed on the device.

    Parameters
    ----------
    launch
        Its number among the launches since the last `synchronize`, from 0.
    cause
        What went wrong.
    """

    def __init__(self, launch: int, cause: Exception) -> None:
        super().__init__(launch, cause)
        self.launch = launch
        self.cause = cause


class Runtime(ABC):
    """Memory and launches of one opened device.

    Buffers are whatever `allocate` returns; the core only hands them back. All methods are called with the
    executor's lock held, so that a runtime needs no lock of its own.
    """

    _awaited: Any = None

    host_memory: bool = False
    """Optional: True when buffers are host memory, so that host tensors are used in place. Default: False."""

    streams: int = 1
    """Optional: how many launches may be under way side by side. Default: 1, and then only `launch` is used."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """Return a new buffer of at least `nbytes` bytes, aligned for any dtype. Raises MemoryError."""

    @abstractmethod
    def free(self, buffer: Any) -> None:
        """Release a buffer that `allocate` returned."""

    @abstractmethod
    def copy_in(self, buffer: Any, byte_offset: int, data: memoryview) -> None:
        """Copy host bytes into a buffer. `data` may be reused by the caller as soon as this returns."""

    @abstractmethod
    def copy_out(self, buffer: Any, byte_offset: int, data: memoryview) -> None:
        """Copy a buffer's bytes into host memory, after everything launched before has finished."""

    @abstractmethod
    def load(self, kernel: KernelDescriptor) -> Any:
        """Return the kernel in the form that `launch` takes: compiled, loaded or just looked up."""

    @abstractmethod
    def launch(self, kernel: Any, config: LaunchConfig, args: Sequence[Any]) -> None:
        """Start a kernel. Tensors among `args` are `PointerArg`.

        For a kernel that declares its parameters, the other values are `ScalarArg`, and a `LocalMemory` where it asks
        for memory that a block shares; `config.shared_nbytes` counts that among the rest. For a callable one they are
        as they were packed, and what the operator takes by name only is in a `NamedArg`, tensors too; results come
        behind the arguments that the call gives. `call_kernel` calls it so.

        Everything that `args` refers to stays alive until `synchronize` or `copy_out` has returned.
        """

    def synchronize(self) -> None:
        """Return when everything launched so far has finished.

        Raises what went wrong on the device: a `LaunchError` where the runtime can tell which launch it was.
        Optional: by default a byte is copied out, which waits as every `copy_out` does, and costs one.
        """
        if self._awaited is None:
            self._awaited = self.allocate(1)
            self.copy_in(self._awaited, 0, memoryview(b"\0"))
        self.copy_out(self._awaited, 0, memoryview(bytearray(1)))

    def launch_on(self, stream: int, kernel: Any, config: LaunchConfig, args: Sequence[Any]) -> None:
        """Start a kernel on one of `streams` streams, after what was started on that stream before.

        Optional: used only where `streams` is more than 1. By default `launch`.
        """
        self.launch(kernel, config, args)

    def record_event(self, stream: int) -> Any:
        """Return an event that happens when everything started on `stream` so far has finished.

        Optional: used only where `streams` is more than 1.
        """
        raise NotImplementedError(f"{type(self).__name__} has {self.streams} streams, but no events")

    def wait_event(self, stream: int, event: Any) -> None:
        """Let what is started on `stream` from here on wait for an event. Must not wait in the calling thread.

        Optional: used only where `streams` is more than 1.
        """
        raise NotImplementedError(f"{type(self).__name__} has {self.streams} streams, but no events")

    def prepare(self, kernel: Any, config: LaunchConfig, args: Sequence[Any]) -> Callable[[], object] | None:
        """Return what starts a launch again and again, as long as its arguments stay the same; None to use `launch`.

        Each call of what is returned does what `launch` does with the same arguments. A plan keeps it, and asks for
        another one when memory of an argument has moved.
        Optional: for a device that sets a kernel's arguments apart from starting it. Used where `streams` is 1.
        """
        return None

    def prepare_on(
        self, stream: int, kernel: Any, config: LaunchConfig, args: Sequence[Any]
    ) -> Callable[[], object] | None:
        """Return what starts a launch on one of `streams` streams, as `prepare` does; None to use `launch_on`.

        Optional: used only where `streams` is more than 1.
        """
        return None

    def record(self, launches: Sequence[Launch]) -> Recording | None:
        """Return what starts several launches at once, again and again; None to start each on its own.

        Asked when a plan runs for the second time, where it has more than one launch. A runtime that declines says
        why in the log.
        Optional: for a device that replays many launches for the price of one, as a CUDA graph does.
        """
        return None

    def why_not_recorded(self, kernels: Sequence[KernelDescriptor]) -> str | None:
        """Return why `record` will decline launches of some kernels, for the plan's report; None where it will not.

        Optional: by default None.
        """
        return None

    imports_host: bool = False
    """Optional: whether `import_host` is asked before host tensors are copied in. Default: False."""

    def import_host(self, address: int, nbytes: int) -> Any:
        """Return a buffer that *is* some host memory, or None where the device cannot use that in place.

        What the host writes there, before a launch, kernels see; and what they write, the host sees after
        `synchronize`. The buffer is freed as any other, which leaves the memory alone, and is not used by a launch
        when the host has given the memory up.
        Optional: used only where `imports_host` is True.
        """
        return None

    torch_device: str | None = None
    """Optional: the torch device, such as ``cuda:0``, whose tensors lie in this device's memory, and so are used in
    place and returned. Default: None, and then every tensor is in host memory."""

    def import_tensor(self, address: int, nbytes: int) -> Any:
        """Return a buffer that *is* memory of a tensor on `torch_device`, from some address on.

        The buffer is freed as any other, which leaves the memory alone. It may have no bytes, and then no address
        that means anything.
        Optional: used only where `torch_device` is set.
        """
        raise NotImplementedError(f"{type(self).__name__} has the torch device {self.torch_device}, but imports none")

    def after_torch(self) -> bool:
        """Let what is launched and copied from here on begin after what torch's current stream has been given.

        The current stream is that of the calling thread on `torch_device`. A runtime that cannot tell torch's streams
        waits for torch itself, and returns False where it cannot do that either: then the core does.
        Optional: used only where `torch_device` is set. Default: False.
        """
        return False

    def before_torch(self) -> bool:
        """Let what torch's current stream is given from here on begin after everything launched and copied so far.

        Must not wait in the calling thread; a runtime that can only wait returns False, and the core waits by
        `synchronize`. One that returns True promises more: launches have read their arguments' host memory, and what
        is allocated, freed, copied and launched from here on comes after them, so that nothing has to be kept.
        Optional: used only where `torch_device` is set. Default: False.
        """
        return False

    def seal(self, segment: Segment) -> Callable[[], SealedSegment] | None:
        """Prepare a segment for running again and again; return what makes its instances.

        Called once per plan; each concurrent call of the plan has an instance, with memory of its own.
        Optional: by default the core launches task by task.
        """
        return None

    def close(self) -> None:
        """Release the device. Optional: by default nothing."""


class ArgumentPacker(ABC):
    """Turns an operator's arguments into a kernel's arguments."""

    @abstractmethod
    def pack(self, call: OpCall, kernel: KernelDescriptor) -> tuple[PackedArg, ...]:
        """Return the packed arguments, in the kernel's order.

        Raises
        ------
        PackingError
            When a value does not fit the parameter that the kernel declares.
        """

    def pack_group(self, calls: Sequence[OpCall], group: OpCall, kernel: KernelDescriptor) -> tuple[PackedArg, ...]:
        """Return the packed arguments of a fused kernel, in the kernel's order.

        Optional: by default `group` is packed as any call is.

        Parameters
        ----------
        calls
            What the kernel computes, in order.
        group
            The same as one call: its arguments are the tensors that come from outside, in the order in which the calls
            take them, and then every other argument of every call; its results are those that leave the group. An
            argument whose name an earlier call has already has the position of its call behind it: ``other1``.
        kernel
            The fused kernel.

        Raises
        ------
        PackingError
            As `pack`.
        """
        return self.pack(group, kernel)


class CodeGenerator(Protocol):
    """Makes kernels of operators that were fused. Optional: a device without one fuses what it has kernels for.

    What `OpenDevice.printer` is, where it is not None.
    """

    def can_generate(self, calls: Sequence[OpCall], inner: Collection[int] = ()) -> str | None:
        """Return why no kernel can be made of some calls, or None when one can. Must be quick: it is asked often.

        Parameters
        ----------
        calls
            In order.
        inner
            Buffers of results that stay inside the kernel.
        """

    def prefers(self, call: OpCall) -> bool:
        """Return whether a kernel made for one call outranks what the registry's resolver finds.

        It never outranks a kernel that was registered. Asked before `can_generate`, for any call.
        """

    def generate(self, calls: Sequence[OpCall], group: OpCall) -> KernelDescriptor:
        """Return a kernel for some calls, of which `can_generate` was None.

        A kernel that was made for just these calls has its arguments packed (`KernelDescriptor.packed`); else the
        device's `ArgumentPacker` packs them.

        Parameters
        ----------
        calls
            In order.
        group
            The same as one call, with the arguments that the kernel is given and the results that it writes, as in
            `ArgumentPacker.pack_group`.
        """


class GraphOptimizer(ABC):
    """Rewrites inference graphs for a device, before their operators are placed. Optional: by default none.

    The core has folded affine steps into weights by then, and computes afterwards what depends on parameters only.
    """

    @abstractmethod
    def optimize(self, graph: InferenceGraph) -> None:
        """Rewrite a graph in place; it must go on giving what it gives, with the same dtypes and shapes.

        Results may come with other strides: where the graph's own come so, the core lays them out as they were.

        Parameters
        ----------
        graph
            A copy that is the optimizer's to change.
        """

    def why_not_float32_products_in(self, dtype: str) -> str | None:
        """Return why `optimize` cannot let float32 products be computed in another dtype; None where it can.

        Optional: by default it cannot.

        Parameters
        ----------
        dtype
            What the config's ``float32_products`` asks for.
        """
        return f"its plugin has no products in {dtype} for float32 tensors"


class LaunchConfigDeriver(ABC):
    """Chooses grid and block of a kernel from its problem's size. It asks the driver nothing: limits are data."""

    @abstractmethod
    def derive(self, calls: Sequence[OpCall], kernel: KernelDescriptor, info: DeviceInfo) -> LaunchConfig | None:
        """Return the launch config; None when there is nothing to launch, as for an empty tensor."""


@dataclass(frozen=True)
class OpenDevice:
    """A device in use: everything that its plugin brought for it.

    Attributes
    ----------
    info
        What the plugin told about the device when it was listed.
    registry, packer, deriver, runtime
        As above.
    printer
        What makes kernels of fused operators, in the device's C-like kernel language; None when it has none, and then
        no kernel is generated for it.
    optimizer
        What rewrites inference graphs; None where it has no wishes.
    """

    info: DeviceInfo
    registry: KernelRegistry
    packer: ArgumentPacker
    deriver: LaunchConfigDeriver
    runtime: Runtime
    printer: CodeGenerator | None = None
    optimizer: GraphOptimizer | None = None

    @property
    def device(self) -> Device:
        """How users name it."""
        return self.info.device

    def has_kernel(self, call: OpCall) -> bool:
        """Whether the registry has a kernel for a call, or one can be generated."""
        return self.registry.has(call) or self._can_generate(call)

    def kernel_for(self, call: OpCall, prefer_generated: bool = True) -> KernelDescriptor:
        """Return the kernel for one call.

        A kernel that was registered comes first. Then, in the order that the code generator prefers, one that the
        registry's resolver finds and one that is generated; at last the registry's default kernel.

        Parameters
        ----------
        call
            The call.
        prefer_generated
            Whether the code generator is asked what it prefers; else the resolver's kernel comes first.

        Raises
        ------
        KernelNotFoundError
            When there is none.
        RegistryError
            When two kernels tie.
        """
        if self.printer is None or self.registry.has_registered(call):
            return self.registry.find(call)
        # what the generator prefers is asked first: making a kernel costs more, and nothing is made to be passed over
        if self.registry.has_resolved(call) and not (prefer_generated and self.printer.prefers(call)):
            return self.registry.find(call)
        if self._can_generate(call):
            return self.printer.generate([call], call)
        try:
            return self.registry.find(call)
        except KernelNotFoundError as error:
            raise KernelNotFoundError(f"{error.message}; {self.not_generated(call)}", hint=error.hint) from None

    def not_generated(self, call: OpCall) -> str | None:
        """Return why no kernel can be generated for a call; None when one can, or the device generates none."""
        refused = None if self.printer is None else self.printer.can_generate([call])
        return None if refused is None else f"none can be generated: {refused}"

    def _can_generate(self, call: OpCall) -> bool:
        return self.printer is not None and self.printer.can_generate([call]) is None
