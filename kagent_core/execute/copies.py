"""Copies between host and device memory: what a plan is given and what it returns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from kagent_core.device import Environment, Observer, Region, SealedSegment
from kagent_core.execute.agent import ExecutorAgent
from kagent_core.execute.host import address_of, empty_like_spec, host_bytes
from kagent_core.execute.in_place import begin_after_torch, let_torch_begin, tensor_key
from kagent_core.execute.model_parameters import explained
from kagent_core.execute.pool import Block
from kagent_core.schedule.placed import Transfer
from kagent_core.specs import TensorSpec


class Copy(SealedSegment):
    """One transfer between host and device memory, with the device memory that it fills.

    Parameters
    ----------
    transfer
        What is copied.
    executor
        Of the device at one end.
    bases
        By buffer, the spec of the tensor that stands for it.
    to_input
        Whether the target is a tensor of the caller's.
    in_place
        Buffers on the device that are tensors of torch's.
    """

    def __init__(
        self,
        transfer: Transfer,
        executor: ExecutorAgent,
        bases: Any,
        to_input: bool,
        in_place: Collection[int] = (),
    ) -> None:
        self._transfer = transfer
        self._executor = executor
        self._runtime = executor.opened.runtime
        self._memory = executor.memory
        self._source_base: TensorSpec = bases[transfer.source]
        self._target_base: TensorSpec = bases[transfer.target]
        self._to_input = to_input
        self._to_tensor = transfer.target in in_place
        self._from_tensor = transfer.source in in_place
        self._block: Block | None = None
        self._region: Region | None = None
        self._imported: tuple[int, Region] | None = None
        if transfer.to_device and not self._to_tensor and not self._runtime.imports_host:
            with explained(self._transfer, self._source_base):
                self._allocated()

    def run(self, environment: Environment) -> None:
        """Copy the bytes and enter the copy into `environment`.

        Raises
        ------
        ExecutionError
            When the device refuses; says what was copied and for whom.
        """
        with explained(self._transfer, self._source_base):
            self._copy(environment)

    def _copy(self, environment: Environment) -> None:
        transfer = self._transfer
        if self._to_tensor:
            self._fill_tensor(environment)
            return
        if transfer.to_device:
            environment[transfer.target] = self._to_device(environment[transfer.source])
            return
        region: Region = environment[transfer.source]
        copied = empty_like_spec(self._target_base, transfer.nbytes)
        if transfer.nbytes:
            with self._executor.lock:
                if self._from_tensor:
                    begin_after_torch(self._runtime)
                whole = host_bytes(copied, self._target_base, transfer.nbytes)
                self._runtime.copy_out(region.buffer, region.byte_offset, whole)
        if self._to_input:  # element by element: what lies between a strided input's elements is not ours
            environment[transfer.target].copy_(copied)
        else:
            environment[transfer.target] = copied

    def _fill_tensor(self, environment: Environment) -> None:
        """Copy host bytes into a tensor on the device."""
        source, nbytes = environment[self._transfer.source], self._transfer.nbytes
        with self._executor.lock:
            if self._to_input:  # by torch, element by element; it waits for nothing but its own stream
                let_torch_begin(self._runtime)
                environment[tensor_key(self._transfer.target)].copy_(source)
            elif nbytes:
                region: Region = environment[self._transfer.target]
                begin_after_torch(self._runtime)
                self._runtime.copy_in(region.buffer, region.byte_offset, host_bytes(source, self._source_base, nbytes))
                let_torch_begin(self._runtime)

    def _to_device(self, tensor: torch.Tensor) -> Region:
        """Return device memory that has a host tensor's bytes: the tensor's own where the device can use it."""
        nbytes = self._transfer.nbytes
        if nbytes and self._runtime.imports_host:
            imported = self._import(address_of(tensor, self._source_base), nbytes)
            if imported is not None:
                return imported
        region = self._region or self._allocated()
        if nbytes:
            with self._executor.lock:
                host = host_bytes(tensor, self._source_base, nbytes)
                self._runtime.copy_in(region.buffer, region.byte_offset, host)
        return region

    def _allocated(self) -> Region:
        # without the executor's lock: other plans may have to give memory up
        self._block = self._memory.take(self._transfer.nbytes, "inputs", self._transfer.needed_by)
        self._region = Region(self._block.buffer)
        return self._region

    def _import(self, address: int, nbytes: int) -> Region | None:
        if self._imported is not None and self._imported[0] == address:
            return self._imported[1]
        with self._executor.lock:
            buffer = self._runtime.import_host(address, nbytes)
            if buffer is None:
                return None
            self._give_up_imported()
            self._imported = (address, Region(buffer))
            return self._imported[1]

    def _give_up_imported(self) -> None:
        if self._imported is not None:
            self._runtime.free(self._imported[1].buffer)
            self._imported = None

    def run_observed(self, environment: Environment, observer: Observer) -> None:
        """As `run`: a transfer is no task."""
        self.run(environment)

    def close(self) -> None:
        """Give the device memory back."""
        with self._executor.lock:
            self._give_up_imported()
            if self._block is not None:
                self._memory.give(self._block)
                self._block = self._region = None
