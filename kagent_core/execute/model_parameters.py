"""ModelParameters: a model's parameters in a device's memory, copied there once and again when they have changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._dynamo.utils import get_static_address_type
from torch.multiprocessing.reductions import StorageWeakRef

from kagent_core.device import Environment, Observer, Region, SealedSegment
from kagent_core.errors import ExecutionError, KagentError
from kagent_core.execute.host import host_bytes
from kagent_core.execute.pool import Block, DeviceMemory
from kagent_core.schedule.placed import Transfer
from kagent_core.specs import TensorSpec
from kagent_core.watch.memory import MemoryWatch, WatchedMemory

Watch = Literal["checked", "version", "copied"]

Key = tuple[int, int, int]
"""A storage, the address of a buffer's first byte in it and its length in bytes.

A storage's number is not used again while there is a weak reference to it.
"""

Stamp = bytes | int
"""What tells whether a parameter has changed: the fingerprint of its bytes, or its version counter."""


@dataclass(eq=False, slots=True)
class Parameter:
    """One parameter's bytes on the device; `stamp` is theirs, None when they are not known to be the parameter's."""

    key: Key
    storage: StorageWeakRef
    block: Block | None = None
    region: Region | None = None
    stamp: Stamp | None = None


class ModelParameters:
    """The parameters that one device has a copy of, shared by every plan that reads them there.

    Parameters
    ----------
    memory
        The device's.
    watch
        How a change is noticed, as the config's ``parameters`` says.
    memory_watch
        Gives what watches host memory, or None where nothing does. Asked when the first parameter comes.
    """

    def __init__(self, memory: DeviceMemory, watch: Watch, memory_watch: Callable[[], MemoryWatch | None]) -> None:
        self.memory = memory
        self.watch = watch
        self._memory_watch = memory_watch
        # never held while the device's lock is taken
        self._lock = threading.Lock()
        self._known: dict[int, StorageWeakRef] = {}
        self._parameters: dict[Key, Parameter] = {}
        self._running: set[Uploads] = set()
        memory.register_last(self.evict)

    def recognize(self, tensor: Any, certain: bool = False) -> bool:
        """Return whether a tensor is a parameter or a buffer of a module, or lies in the memory of one.

        Graphs of backward passes are given views of the parameters that their forward pass was given.

        Parameters
        ----------
        tensor
            Anything.
        certain
            Whether it is known to be as good as a parameter.
        """
        if self.watch == "copied" or not isinstance(tensor, torch.Tensor):
            return False
        storage = tensor.untyped_storage()
        with self._lock:
            if certain or isinstance(tensor, torch.nn.Parameter) or get_static_address_type(tensor) is not None:
                self._known[storage._cdata] = StorageWeakRef(storage)
            known = self._known.get(storage._cdata)
            return known is not None and not known.expired()

    def enter(self, uploads: Uploads, tensors: Sequence[torch.Tensor], keys: Sequence[Key]) -> None:
        """Give a plan's instance the parameters of some keys; where there are none yet, new ones without memory."""
        with self._lock:  # at once: what a running instance has entered is not given up
            found = []
            for tensor, key in zip(tensors, keys, strict=True):
                if key not in self._parameters:
                    self._parameters[key] = Parameter(key, StorageWeakRef(tensor.untyped_storage()))
                found.append(self._parameters[key])
            uploads.parameters = found
        self.sweep()  # what these may have taken the place of

    def place(self, parameter: Parameter, needed_by: str) -> None:
        """Give a parameter memory. It must be in use by a running plan."""
        block = self.memory.take(parameter.key[2], "parameters", needed_by)
        with self._lock:
            if parameter.region is None:
                parameter.block, parameter.region = block, Region(block.buffer)
                return
        self.memory.give(block)

    @contextlib.contextmanager
    def used_by(self, uploads: Uploads) -> Iterator[None]:
        """Keep what a plan's instance has entered in memory inside the ``with`` block."""
        with self._lock:
            self._running.add(uploads)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(uploads)

    def sweep(self) -> bool:
        """Give back the memory of parameters that are gone; return whether there was any."""
        with self._lock:
            for storage in [storage for storage, known in self._known.items() if known.expired()]:
                del self._known[storage]
            gone = [p for p in self._unused() if p.storage.expired()]
            blocks = [self._taken_from(parameter) for parameter in gone]
        return self._give(blocks)

    def evict(self) -> bool:
        """Give up parameters that are gone, else one that no running plan uses."""
        if self.sweep():
            return True
        with self._lock:
            parameter = next((p for p in self._unused() if p.block is not None), None)
            blocks = [] if parameter is None else [self._taken_from(parameter)]
        return self._give(blocks)

    def table(self, ranges: Sequence[tuple[int, int]]) -> WatchedMemory | None:
        """Return what computes the fingerprints of some memory; None where nothing does."""
        memory_watch = self._memory_watch()
        return None if memory_watch is None else memory_watch.table(ranges)

    def _unused(self) -> list[Parameter]:
        used = {id(parameter) for uploads in self._running for parameter in uploads.parameters}
        return [parameter for parameter in self._parameters.values() if id(parameter) not in used]

    def _taken_from(self, parameter: Parameter) -> Block | None:
        del self._parameters[parameter.key]
        block, parameter.block, parameter.region, parameter.stamp = parameter.block, None, None, None
        return block

    def _give(self, blocks: Sequence[Block | None]) -> bool:
        given = [block for block in blocks if block is not None]
        for block in given:
            self.memory.give(block)
        return bool(given)


class Uploads(SealedSegment):
    """The parameters that one instance of a plan reads on one device.

    Parameters
    ----------
    shared
        The device's.
    transfers
        What a plan without shared parameters would copy.
    bases
        By buffer, the spec of the tensor that stands for it.
    """

    def __init__(self, shared: ModelParameters, transfers: Sequence[Transfer], bases: Any) -> None:
        self._shared = shared
        self._bases: list[TensorSpec] = [bases[transfer.source] for transfer in transfers]
        self._transfers = transfers
        self._keys: list[Key] = []
        self._table: WatchedMemory | None = None
        self.parameters: list[Parameter] = []

    def run(self, environment: Environment) -> None:
        """Bring what has changed to the device and enter the parameters' regions into `environment`.

        To be called inside of `in_use`, which lasts as long as anything that is launched reads them.

        Raises
        ------
        ExecutionError
            When the device refuses; says which parameter was copied and for whom.
        """
        tensors = [environment[transfer.source] for transfer in self._transfers]
        keys = [self._key(tensor, n) for n, tensor in enumerate(tensors)]
        if keys != self._keys or any(parameter.region is None for parameter in self.parameters):
            self._shared.enter(self, tensors, keys)
            self._keys, self._table = keys, self._table_of(range(len(keys)), keys)
        # before anything is copied: what is written meanwhile has another stamp the next time
        stamps = self._stamps(tensors, self._table)
        for parameter, transfer, base in zip(self.parameters, self._transfers, self._bases, strict=True):
            if parameter.region is None:
                with explained(transfer, base):
                    self._shared.place(parameter, transfer.needed_by)
        memory = self._shared.memory
        with memory.lock:
            changed = [
                n
                for n, (parameter, stamp) in enumerate(zip(self.parameters, stamps, strict=True))
                if stamp is None or parameter.stamp != stamp
            ]
            for n in changed:
                self._copy(n, tensors[n])
            if changed:
                self._note(changed, stamps, tensors)
        for parameter, transfer in zip(self.parameters, self._transfers, strict=True):
            environment[transfer.target] = parameter.region

    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """As `run`: an upload is no task."""
        self.run(environment)

    def in_use(self) -> AbstractContextManager[None]:
        """Keep the parameters in memory inside the ``with`` block."""
        return self._shared.used_by(self)

    def _key(self, tensor: torch.Tensor, number: int) -> Key:
        base, storage = self._bases[number], tensor.untyped_storage()
        shift = (int(tensor.storage_offset()) - base.storage_offset) * base.dtype.itemsize
        return storage._cdata, storage.data_ptr() + shift, self._transfers[number].nbytes

    def _table_of(self, numbers: Iterable[int], keys: Sequence[Key]) -> WatchedMemory | None:
        return self._shared.table([keys[n][1:] for n in numbers]) if self._shared.watch == "checked" else None

    def _stamps(self, tensors: Sequence[torch.Tensor], table: WatchedMemory | None) -> Sequence[Stamp | None]:
        if self._shared.watch == "version":
            return [None if tensor.is_inference() else tensor._version for tensor in tensors]
        return [None] * len(tensors) if table is None else table.compute()

    def _copy(self, number: int, tensor: torch.Tensor) -> None:
        parameter, transfer, region = self.parameters[number], self._transfers[number], self.parameters[number].region
        assert region is not None
        parameter.stamp = None
        if transfer.nbytes:
            host = host_bytes(tensor, self._bases[number], transfer.nbytes)
            with explained(transfer, self._bases[number]):
                self._shared.memory.runtime.copy_in(region.buffer, region.byte_offset, host)

    def _note(self, changed: Sequence[int], stamps: Sequence[Stamp | None], tensors: Sequence[torch.Tensor]) -> None:
        """Note what was copied, unless another thread has written it meanwhile, and may write the old bytes again."""
        everything = len(changed) == len(tensors)
        table = self._table if everything else self._table_of(changed, self._keys)
        again = self._stamps([tensors[n] for n in changed], table)
        for n, stamp in zip(changed, again, strict=True):
            self.parameters[n].stamp = stamp if stamp == stamps[n] else None


@contextlib.contextmanager
def explained(transfer: Transfer, base: TensorSpec) -> Iterator[None]:
    """Say what was copied and for whom when a copy between host and device fails."""
    try:
        yield
    except KagentError:
        raise
    except Exception as error:
        way = f"to {transfer.device}" if transfer.to_device else f"off {transfer.device}"
        raise ExecutionError(
            f"copying {base} ({transfer.nbytes} bytes) from {transfer.made_by} {way} for {transfer.needed_by} failed "
            f"with {type(error).__name__}: {error}"
        ) from error
