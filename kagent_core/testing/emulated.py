"""Emulated accelerators and their drivers: what a device plugin is written against when there is no hardware.

`Driver` and `Library` are what vendors' Python bindings usually look like: memory by address, copies, launches that
are queued and run later. A `Driver` compiles kernels in a C-like language; a `Library` has a fixed set of kernels. They
are strict where real drivers are strict, and where those are silent they say what is wrong: memory has guard zones,
what was never written reads as `POISON`, an argument has the size that the kernel declares, and memory is not freed
under a kernel that has yet to run.

A driver's kernel language is C with three additions: ``KERNEL`` before a kernel, ``item_number()`` and
``item_count()``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kagent_core.native import find_compiler, load, why_no_compiler

if TYPE_CHECKING:
    import torch

POISON = 0xA5
"""Every byte of memory that was never written reads as this."""

GUARD = 64
"""Bytes before and behind every allocation that nobody may touch; allocations are aligned to as much."""

_GUARD_BYTE = 0x5C

_PRELUDE = """\
static __thread long emulated_item, emulated_count;
static inline long item_number(void) { return emulated_item; }
static inline long item_count(void) { return emulated_count; }
#define KERNEL static inline __attribute__((always_inline))
double exp(double), exp2(double), expm1(double), log(double), log2(double), log10(double), log1p(double);
float expf(float), exp2f(float), expm1f(float), logf(float), log2f(float), log10f(float), log1pf(float);
double sin(double), cos(double), tan(double), asin(double), acos(double), atan(double), erf(double), erfc(double);
float sinf(float), cosf(float), tanf(float), asinf(float), acosf(float), atanf(float), erff(float), erfcf(float);
double sinh(double), cosh(double), tanh(double), asinh(double), acosh(double), atanh(double), lgamma(double);
float sinhf(float), coshf(float), tanhf(float), asinhf(float), acoshf(float), atanhf(float), lgammaf(float);
double tgamma(double), sqrt(double), fabs(double), floor(double), ceil(double), trunc(double), rint(double);
float tgammaf(float), sqrtf(float), fabsf(float), floorf(float), ceilf(float), truncf(float), rintf(float);
double pow(double, double), atan2(double, double), hypot(double, double), fmod(double, double);
float powf(float, float), atan2f(float, float), hypotf(float, float), fmodf(float, float);
double fmin(double, double), fmax(double, double), copysign(double, double), nextafter(double, double);
float fminf(float, float), fmaxf(float, float), copysignf(float, float), nextafterf(float, float);
double fma(double, double, double), ldexp(double, int);
float fmaf(float, float, float), ldexpf(float, int);
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
"""


class DriverError(RuntimeError):
    """What the driver refuses."""


@dataclass(frozen=True)
class Function:
    """A compiled kernel.

    Attributes
    ----------
    name
        Of the kernel.
    sizes
        Bytes of each parameter.
    """

    name: str
    sizes: tuple[int, ...]
    _entry: Callable[[int], None]


@dataclass
class _Allocation:
    address: int
    nbytes: int
    block: ctypes.Array[ctypes.c_ubyte]
    base: int = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.address - GUARD

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.nbytes

    def guards_hold(self) -> bool:
        guard = bytes([_GUARD_BYTE]) * GUARD
        before = ctypes.string_at(self.base, GUARD)
        return before == guard and ctypes.string_at(self.address + self.nbytes, GUARD) == guard


@dataclass(frozen=True)
class _Work:
    """Something that is queued: a kernel and the addresses that it was given."""

    kernel: str
    addresses: tuple[int, ...]
    run: Callable[[], None]


class Accelerator:
    """Memory and a queue: what both kinds of drivers have.

    Parameters
    ----------
    memory_nbytes
        Of the device's memory.
    """

    def __init__(self, memory_nbytes: int = 2**32) -> None:
        self.memory_nbytes = memory_nbytes
        self._allocations: dict[int, _Allocation] = {}
        self._used = 0
        self._queue: list[_Work] = []
        self._lock = threading.RLock()

    # -- memory

    def alloc(self, nbytes: int) -> int:
        """Return the address of new memory, which is never 0.

        Raises
        ------
        MemoryError
            When the device has not that much left.
        """
        with self._lock:
            nbytes = max(nbytes, 1)
            if self._used + nbytes > self.memory_nbytes:
                left = self.memory_nbytes - self._used
                raise MemoryError(f"{nbytes} bytes wanted, {left} of {self.memory_nbytes} are left")
            block = (ctypes.c_ubyte * (nbytes + 3 * GUARD))()
            start = ctypes.addressof(block)
            address = start + GUARD + -start % GUARD
            ctypes.memset(start, _GUARD_BYTE, len(block))
            ctypes.memset(address, POISON, nbytes)
            self._allocations[address] = _Allocation(address, nbytes, block)
            self._used += nbytes
            return address

    def free(self, address: int) -> None:
        """Give memory back.

        Raises
        ------
        DriverError
            When it is not allocated, a queued kernel was given it, or somebody wrote beside it.
        """
        with self._lock:
            allocation = self._allocations.get(address)
            if allocation is None:
                raise DriverError(f"free of address {address:#x}, which is not allocated")
            for launch in self._queue:
                if any(allocation.holds(address) for address in launch.addresses):
                    raise DriverError(f"free of memory that kernel '{launch.kernel}' is yet to use")
            self._check_guards()
            ctypes.memset(address, POISON, allocation.nbytes)
            del self._allocations[address]
            self._used -= allocation.nbytes

    def write(self, address: int, data: memoryview) -> None:
        """Copy host bytes to the device, after all that was started before."""
        with self._lock:
            self.wait()
            self._check_range(address, data.nbytes, "write")
            ctypes.memmove(address, bytes(data), data.nbytes)

    def read(self, address: int, data: memoryview) -> None:
        """Copy bytes of the device to the host, after all that was started before."""
        with self._lock:
            self.wait()
            self._check_range(address, data.nbytes, "read")
            data.cast("B")[:] = ctypes.string_at(address, data.nbytes)

    def wait(self) -> None:
        """Run all that is queued.

        Raises
        ------
        DriverError
            When a kernel wrote beside the memory that it was given.
        """
        with self._lock:
            queue, self._queue = self._queue, []
            for work in queue:
                work.run()
                self._check_guards(work.kernel)

    # -- inside

    def _enqueue(self, kernel: str, addresses: Sequence[int], run: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(_Work(kernel, tuple(addresses), run))

    def _check_guards(self, kernel: str = "") -> None:
        for allocation in self._allocations.values():
            if not allocation.guards_hold():
                who = f"kernel '{kernel}'" if kernel else "somebody"
                raise DriverError(f"{who} wrote beside an allocation of {allocation.nbytes} bytes")

    def _check_range(self, address: int, nbytes: int, what: str) -> None:
        for allocation in self._allocations.values():
            if allocation.address <= address and address + nbytes <= allocation.address + allocation.nbytes:
                return
        raise DriverError(f"{what} of {nbytes} bytes at {address:#x}, which no allocation holds")


class Driver(Accelerator):
    """An accelerator that compiles kernels.

    Parameters
    ----------
    cache_dir
        Where compiled kernels are kept.
    memory_nbytes
        Of the device's memory.
    """

    def __init__(self, cache_dir: Path, memory_nbytes: int = 2**32) -> None:
        super().__init__(memory_nbytes)
        self._cache_dir = cache_dir

    @staticmethod
    def missing() -> str | None:
        """Return why there is no such device here, or None: it compiles with a C compiler. Nothing is tried yet."""
        wanted = os.environ.get("CC", "").split()[:1] or ["gcc", "clang"]
        if any(map(shutil.which, wanted)) or importlib.util.find_spec("ziglang") is not None:
            return None
        return f"{' or '.join(wanted)} was not found; install a C compiler, or `pip install ziglang`"

    def compile(self, source: str, name: str) -> Function:
        """Compile one kernel.

        Raises
        ------
        DriverError
            When the source has no such kernel.
        kagent_core.errors.CompilationError
            When the compiler refuses it; says why.
        """
        compiler = find_compiler()
        if compiler is None:
            raise DriverError(f"the emulated accelerator compiles with a C compiler: {why_no_compiler()}")
        types = _parameter_types(source, name)
        passed = ", ".join(f"*({kind} *)table[{n + 1}]" for n, kind in enumerate(types))
        sizes = " ".join(f"table[{n}] = sizeof({kind});" for n, kind in enumerate(types))
        text = f"{_PRELUDE}{source}\n"
        text += f"void sizes_of(long *table) {{ {sizes} }}\n"
        text += "void run(long *table) {\n    emulated_count = table[0];\n"
        text += f"    for (emulated_item = 0; emulated_item < emulated_count; emulated_item++) {name}({passed});\n}}\n"
        library = load(text, self._cache_dir, compiler)
        table = (ctypes.c_int64 * max(len(types), 1))()
        library.function("sizes_of")(ctypes.addressof(table))
        return Function(name, tuple(table[: len(types)]), library.function("run"))

    def start(self, function: Function, items: int, args: Sequence[bytes]) -> None:
        """Queue a kernel. It runs at the next `wait`, `write` or `read`.

        Parameters
        ----------
        function
            What `compile` returned.
        items
            How many work-items run it.
        args
            The bytes of each argument: of memory, its address in 8 bytes. They are copied.

        Raises
        ------
        DriverError
            When number or sizes of the arguments are not the kernel's.
        """
        sizes = tuple(len(arg) for arg in args)
        if sizes != function.sizes:
            raise DriverError(
                f"kernel '{function.name}' takes {len(function.sizes)} arguments of {function.sizes} bytes, "
                f"{len(sizes)} of {sizes} bytes came"
            )
        if items < 1:
            raise DriverError(f"kernel '{function.name}' was started with {items} work-items")
        held = [ctypes.create_string_buffer(bytes(arg), len(arg)) for arg in args]
        table = (ctypes.c_int64 * (1 + len(held)))(items, *map(ctypes.addressof, held))

        def run(held: object = held) -> None:  # the table points to what it holds
            function._entry(ctypes.addressof(table))

        self._enqueue(function.name, [struct.unpack("<Q", arg)[0] for arg in args if len(arg) == 8], run)


@dataclass(frozen=True)
class Tensor:
    """A tensor as a `Library` takes it.

    Attributes
    ----------
    address
        Of its first element.
    dtype
        Name of its element type.
    shape, strides
        In elements.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one behind the other, the last dimension innermost."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class Library(Accelerator):
    """An accelerator with a fixed set of kernels, for float32 alone, as that of an NPU."""

    @staticmethod
    def missing() -> str | None:
        """Return why there is no such device here, or None."""
        return None

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy elements, whatever the strides."""
        self._run("copy", lambda x, out: out.copy_(x), source, target)

    def add(self, x: Tensor, y: Tensor | float, out: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times `y`, a number or a tensor that can be broadcast, to `x`."""
        self._run("add", lambda x, y, out: out.copy_(x.add(y, alpha=alpha)), x, y, out)

    def multiply(self, x: Tensor, y: Tensor | float, out: Tensor) -> None:
        """Multiply elements with a number, or with those of a tensor that can be broadcast."""
        self._run("multiply", lambda x, y, out: out.copy_(x.mul(y)), x, y, out)

    def relu(self, x: Tensor, out: Tensor) -> None:
        """Set negative elements to 0, of contiguous tensors."""
        self._need_contiguous("relu", x, out)
        self._run("relu", lambda x, out: out.copy_(x.relu()), x, out)

    def matmul(
        self, x: Tensor, y: Tensor, out: Tensor, alpha: float = 1.0, bias: Tensor | None = None, beta: float = 1.0
    ) -> None:
        """Multiply contiguous matrices; `beta` times `bias`, which can be broadcast, is added."""
        self._need_contiguous("matmul", *(tensor for tensor in (x, y, out, bias) if tensor is not None))
        if bias is None:
            self._run("matmul", lambda x, y, out: out.copy_(x.mm(y).mul(alpha)), x, y, out)
        else:
            self._run("matmul", lambda b, x, y, out: out.copy_(b.addmm(x, y, alpha=alpha, beta=beta)), bias, x, y, out)

    def _need_contiguous(self, kernel: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            if not tensor.is_contiguous:
                raise DriverError(f"{kernel} takes contiguous tensors, strides {tensor.strides} came")

    def _run(self, kernel: str, function: Callable[..., torch.Tensor], *operands: Tensor | float) -> None:
        for operand in operands:
            if isinstance(operand, Tensor) and operand.dtype != "float32":
                raise DriverError(f"{kernel} takes float32, {operand.dtype} came")

        def run() -> None:
            function(*(_on_host(x) if isinstance(x, Tensor) else x for x in operands))

        self._enqueue(kernel, [x.address for x in operands if isinstance(x, Tensor)], run)


def _on_host(tensor: Tensor) -> torch.Tensor:
    """Return a tensor's elements as the host sees them: an emulated device's memory is the host's."""
    import torch

    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)) + 1
    if 0 in tensor.shape:
        return torch.empty_strided(tensor.shape, tensor.strides)
    flat = torch.frombuffer((ctypes.c_float * span).from_address(tensor.address), dtype=torch.float32)
    return flat.as_strided(tensor.shape, tensor.strides)


def _parameter_types(source: str, name: str) -> list[str]:
    """Return the types of a kernel's parameters, as its definition spells them."""
    plain = re.sub(r"/\*.*?\*/|//[^\n]*", " ", source, flags=re.DOTALL)
    found = re.search(rf"\bKERNEL\s+void\s+{re.escape(name)}\s*\(([^)]*)\)\s*\{{", plain)
    if found is None:
        raise DriverError(f"the source has no kernel '{name}': expected 'KERNEL void {name}(...) {{'")
    parameters = [part.strip() for part in found[1].split(",") if part.strip() not in ("", "void")]
    return [re.sub(r"\b(restrict|const)\b", "", re.sub(r"\w+$", "", part)).strip() for part in parameters]
