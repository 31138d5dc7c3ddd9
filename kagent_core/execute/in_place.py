"""Tensors of a torch device as memory of the device that computes: used where they lie, and returned."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kagent_core.device import Environment, Observer, Region, Runtime, SealedSegment
from kagent_core.execute.host import address_of, empty_like_spec
from kagent_core.execute.pool import DeviceMemory
from kagent_core.specs import TensorSpec


def tensor_key(buffer: int) -> int:
    """Return where an environment holds the tensor whose memory is a buffer's `Region`: no buffer has that number."""
    return ~buffer


def let_torch_begin(runtime: Runtime) -> None:
    """Let what torch's current stream is given from here on come after all that was launched. Holds the lock."""
    if not runtime.before_torch():
        runtime.synchronize()


def begin_after_torch(runtime: Runtime) -> None:
    """Let what is launched from here on come after what torch's current stream was given. Holds the lock."""
    if not runtime.after_torch():
        device = torch.device(runtime.torch_device or "cpu")
        torch.get_device_module(device).synchronize(device)


class InPlace(SealedSegment):
    """The tensors of one call on one device: those that the caller gives, and new ones for its results.

    A region stays the same object for as long as its tensor lies where it lay, so that launches need not be prepared
    again.

    Parameters
    ----------
    memory
        The device's.
    given
        By buffer, the spec of the tensor that an environment has for it.
    made
        The same for tensors to be made.
    nbytes
        By buffer, how many bytes of it are used.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        given: Mapping[int, TensorSpec],
        made: Mapping[int, TensorSpec],
        nbytes: Mapping[int, int],
    ) -> None:
        self._lock = memory.lock
        self._runtime = memory.runtime
        self._given = tuple(given.items())
        self._made = tuple(made.items())
        self._nbytes = nbytes
        self._device = self._runtime.torch_device
        self._known: dict[int, tuple[int, Region]] = {}

    def run(self, environment: Environment) -> None:
        """Put every buffer's region into the environment, and its tensor under the `tensor_key`."""
        for buffer, base in self._given:
            self._enter(environment, buffer, environment[buffer], base)
        for buffer, base in self._made:
            self._enter(environment, buffer, empty_like_spec(base, self._nbytes[buffer], self._device), base)

    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """As `run`: nothing is launched."""
        self.run(environment)

    def close(self) -> None:
        """Let go of the regions. The memory is torch's."""
        with self._lock:
            for _, region in self._known.values():
                self._runtime.free(region.buffer)
            self._known.clear()

    def _enter(self, environment: Environment, buffer: int, tensor: torch.Tensor, base: TensorSpec) -> None:
        environment[tensor_key(buffer)] = tensor
        # the quick way, for there are many parameters; a tensor without elements has no address of its own
        begin = base.storage_offset * base.dtype.itemsize
        address = tensor.data_ptr() - begin if base.numel else address_of(tensor, base)
        known = self._known.get(buffer)
        if known is None or known[0] != address:
            with self._lock:
                if known is not None:
                    self._runtime.free(known[1].buffer)
                known = address, Region(self._runtime.import_tensor(address, self._nbytes[buffer]))
                self._known[buffer] = known
        environment[buffer] = known[1]
