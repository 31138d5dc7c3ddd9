"""A torch device without hardware, and a device of kagent's in whose memory its tensors lie.

For runtimes that say `Runtime.torch_device`, and for how the core uses them. PyTorch lends its device type
``privateuseone`` to whoever wants one; the one made here has memory of its own kind (the host's, poisoned when it is
made and when it is given up) and no kernels: PyTorch's operators run on the CPU, through copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from kagent_core.config import load_config
from kagent_core.errors import ConfigError
from kagent_core.testing.fake_runtime import AccessError, FakeBuffer, FakeRuntime

TORCH_DEVICE = "privateuseone:0"

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ("-std=c++20", "-shared", "-fPIC", "-O0", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1")


class TorchModule:
    """What PyTorch asks of a device's Python module.

    Attributes
    ----------
    synchronized
        How often somebody waited for the device.
    """

    synchronized = 0

    @staticmethod
    def is_available() -> bool:
        """Return True."""
        return True

    @staticmethod
    def device_count() -> int:
        """Return 1."""
        return 1

    @staticmethod
    def current_device() -> int:
        """Return 0."""
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Do nothing: there are no random numbers of its own."""

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """Return a state without a byte; PyTorch saves that of every accelerator, by `set_rng_state` it comes back."""
        return torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Do nothing."""

    @classmethod
    def synchronize(cls, device: Any = None) -> None:
        """Count: what PyTorch runs on the device has finished when the call returns."""
        cls.synchronized += 1


@functools.cache
def register_torch_device() -> type[TorchModule]:
    """Make ``privateuseone:0`` a device of this process's PyTorch, and return its module.

    Compiled once for each version of PyTorch, with a C++ compiler.

    Raises
    ------
    ConfigError
        When there is no C++ compiler, or it fails.
    """
    torch.ops.load_library(str(_library()))
    rename_privateuse1_backend("privateuseone")  # autograd knows no device that nobody has named
    torch._register_device_module("privateuseone", TorchModule)
    return TorchModule


def torch_device_blocks() -> list[tuple[int, int]]:
    """Return address and bytes of all memory that tensors of the device have."""
    function = ctypes.CDLL(str(_library())).torch_device_blocks
    function.restype, count = ctypes.c_long, 1024
    while True:
        pairs = (ctypes.c_uint64 * (2 * count))()
        found = function(pairs, ctypes.c_long(count))
        if found <= count:
            return [(pairs[2 * n], pairs[2 * n + 1]) for n in range(found)]
        count = found


@contextlib.contextmanager
def held_memory() -> Iterator[None]:
    """Keep memory of tensors that are gone inside the ``with`` block.

    An allocator with streams lets what was launched before still use it: here nobody else gets it meanwhile.
    """
    hold = ctypes.CDLL(str(_library())).torch_device_hold
    hold(ctypes.c_long(1))
    try:
        yield
    finally:
        hold(ctypes.c_long(0))


@functools.cache
def _library() -> Path:
    key = hashlib.sha256(f"{torch.__version__} {_FLAGS}".encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    library = load_config().cache_dir / f"torch-device-{key}.so"
    if library.exists():
        return library
    command = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or ""]
    if not command[0]:
        raise ConfigError("the torch device for tests is compiled, and no C++ compiler was found", hint="install g++")
    root = Path(torch.__file__).parent
    library.parent.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}")
    includes = (f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}")
    libraries = (f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")
    whole = [*command, *_FLAGS, *includes, str(_SOURCE), "-o", str(made), *libraries]
    done = subprocess.run(whole, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"the torch device for tests does not compile: {done.stderr.strip()[:2000]}")
    made.replace(library)  # at once: another process may be at it too
    return library


class TorchMemoryRuntime(FakeRuntime):
    """The fake device, in whose memory the tensors of ``privateuseone:0`` lie.

    Attributes
    ----------
    imported
        Buffers on torch's memory that are in use.
    """

    torch_device = TORCH_DEVICE

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.imported = 0

    def import_tensor(self, address: int, nbytes: int) -> FakeBuffer:
        """Return a buffer on a tensor's memory."""
        self._count("import_tensor")
        self.imported += 1
        return _Imported(memoryview((ctypes.c_ubyte * nbytes).from_address(address) if nbytes else b"").cast("B"))

    def free(self, buffer: FakeBuffer) -> None:
        """Free memory of the device's own; let go of what was imported."""
        if not isinstance(buffer, _Imported):
            super().free(buffer)
            return
        if buffer.freed:
            raise AccessError("a buffer on a tensor's memory was freed twice")
        buffer.freed = True
        self.imported -= 1


class _Imported(FakeBuffer):
    """A buffer on memory of torch's."""
