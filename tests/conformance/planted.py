"""Devices that are broken in one way each, for the kit to find out."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from typing import Any

from kagent_core import hookimpl
from kagent_core.device import ArgumentPacker, PointerArg, Recording, Runtime
from kagent_core.execute.launch import LaunchEach
from kagent_core.execute.pool import DeviceMemory
from kagent_core.specs import Access, TensorSpec
from kagent_core.testing.fake import FakeBuffer, FakeDevice, FakeRuntime

# -- memory


class CopyOutIgnoresOffset(FakeRuntime):
    def copy_out(self, buffer, byte_offset, data):
        super().copy_out(buffer, 0, data)


class CopyInIgnoresOffset(FakeRuntime):
    def copy_in(self, buffer, byte_offset, data):
        super().copy_in(buffer, 0, data)


class CopiesWholeWords(FakeRuntime):
    """Rounds what it copies in up to four bytes."""

    def copy_in(self, buffer, byte_offset, data):
        padded = bytes(data) + bytes(-len(data) % 4)
        super().copy_in(buffer, byte_offset, memoryview(padded)[: len(buffer.data) - byte_offset])


class DropsTheLastByte(FakeRuntime):
    def copy_out(self, buffer, byte_offset, data):
        super().copy_out(buffer, byte_offset, data[: max(0, data.nbytes - 1)])


class FailsOnNothing(FakeRuntime):
    """As a driver that refuses buffers and copies without bytes."""

    def allocate(self, nbytes):
        if nbytes == 0:
            raise ValueError("invalid buffer size")
        return super().allocate(nbytes)


class ReadsHostMemoryLate(FakeRuntime):
    """Copies in when something is copied out, from memory that may be another's by then."""

    def __init__(self):
        super().__init__()
        self.late = []

    def copy_in(self, buffer, byte_offset, data):
        self.late.append((buffer, byte_offset, data))

    def copy_out(self, buffer, byte_offset, data):
        for pending in self.late:
            super().copy_in(*pending)
        self.late.clear()
        super().copy_out(buffer, byte_offset, data)


class FreesTwice(FakeRuntime):
    """Puts what is freed into a pool, twice."""

    def __init__(self):
        super().__init__()
        self.pool = []

    def allocate(self, nbytes):
        for position, data in enumerate(self.pool):
            if len(data) >= nbytes:
                self.live += 1
                return FakeBuffer(self.pool.pop(position))
        return super().allocate(nbytes)

    def free(self, buffer):
        self.live -= 1
        self.pool += [buffer.data, buffer.data]


class AllocationsOverlap(FakeRuntime):
    """Gives each buffer one byte less than it says."""

    def __init__(self):
        super().__init__()
        self.memory = memoryview(bytearray(256 << 20))
        self.end = 0

    def allocate(self, nbytes):
        if self.end + nbytes > len(self.memory):
            raise MemoryError
        self.live += 1
        buffer = FakeBuffer(self.memory[self.end : self.end + max(nbytes, 1)])
        self.end += max(nbytes - 1, 1)
        return buffer

    def free(self, buffer):
        self.live -= 1


class Recorded(Recording):
    """Launches that are started one after the other."""

    def __init__(self, runtime, launches):
        self.runtime = runtime
        self.launches = list(launches)

    def start(self):
        for launch in self.launches:
            self.runtime.launch(launch.kernel, launch.config, launch.args)

    def update(self, position, args):
        self.launches[position] = replace(self.launches[position], args=args)


class Records(FakeRuntime):
    recording = Recorded

    def record(self, launches):
        return self.recording(self, launches)


class KeepsStaleArguments(Records):
    """Starts its launches with the arguments that they were recorded with."""

    class recording(Recorded):
        def update(self, position, args):
            pass


class UpdatesTheNextLaunch(Records):
    class recording(Recorded):
        def update(self, position, args):
            super().update((position + 1) % len(self.launches), args)


class SkipsTheLastLaunch(Records):
    class recording(Recorded):
        def start(self):
            for launch in self.launches[:-1]:
                self.runtime.launch(launch.kernel, launch.config, launch.args)


class StartsOnce(Records):
    """Starts nothing from the second time on."""

    class recording(Recorded):
        def start(self):
            super().start()
            self.launches.clear()


class StartsInAnyOrder(Records):
    class recording(Recorded):
        def start(self):
            for launch in reversed(self.launches):
                self.runtime.launch(launch.kernel, launch.config, launch.args)


class RefusesOtherArguments(Records):
    class recording(Recorded):
        def update(self, position, args):
            raise NotImplementedError("a recording stays as it is")


class GivesNoneForTooMuch(FakeRuntime):
    def allocate(self, nbytes):
        return None if nbytes > 1 << 40 else super().allocate(nbytes)


class GivesLessForTooMuch(FakeRuntime):
    def allocate(self, nbytes):
        return super().allocate(min(nbytes, 1 << 20))


class DiesOfTooMuch(FakeRuntime):
    """Works no more after memory was refused once."""

    dead = False

    def allocate(self, nbytes):
        if self.dead or nbytes > 1 << 40:
            self.dead = True
            raise MemoryError("out of memory")
        return super().allocate(nbytes)


class Leaks(FakeRuntime):
    """Takes what is freed, and keeps it."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def free(self, buffer):
        self.live -= 1
        self.kept.append(buffer)


class WaitsByCopying(FakeRuntime):
    """Sound: waits as the contract's default does, with a buffer that it keeps."""

    synchronize = Runtime.synchronize


class ImportsACopy(FakeRuntime):
    """Says that it uses host memory in place, and copies it."""

    imports_host = True

    def import_host(self, address, nbytes):
        self.live += 1
        return FakeBuffer(bytearray(ctypes.string_at(address, nbytes)))


class FreesTheHostsMemory(FakeRuntime):
    """Uses host memory in place, and poisons it as its own when it is freed."""

    imports_host = True

    def import_host(self, address, nbytes):
        self.live += 1
        return FakeBuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B"))


class ImportsInPlace(FreesTheHostsMemory):
    """Sound: leaves the host's memory alone."""

    def free(self, buffer):
        if isinstance(buffer.data, memoryview):
            self.live -= 1
        else:
            super().free(buffer)


class ClosesForGood(FakeRuntime):
    closed = False

    def close(self):
        super().close()
        self.closed = True

    def allocate(self, nbytes):
        if self.closed:
            raise RuntimeError("the context was destroyed")
        return super().allocate(nbytes)


# -- launches


class LoadsAnything(FakeRuntime):
    """Takes what it cannot compile for a kernel that does nothing."""

    def load(self, kernel):
        return super().load(kernel if kernel.function else replace(kernel, function=lambda *args: None))


class OneLaunchBehind(FakeRuntime):
    """Starts a launch when the next one comes, and waits for none."""

    def __init__(self):
        super().__init__()
        self.held = None

    def launch_on(self, stream, kernel, config, args):
        if self.held is not None:
            super().launch_on(*self.held)
            self._wait()
        self.held = (stream, kernel, config, list(args))


class OneSlotForScalars(FakeRuntime):
    """Runs launches when it is waited for; each sees the scalars of the last one."""

    def __init__(self):
        super().__init__()
        self.held = []

    def launch_on(self, stream, kernel, config, args):
        self.held.append((stream, kernel, config, list(args)))

    def _wait(self):
        held, self.held = self.held, []
        for stream, kernel, config, args in held:
            last = held[-1][3]
            late = [last[i] if i < len(last) and is_scalar(arg, last[i]) else arg for i, arg in enumerate(args)]
            super().launch_on(stream, kernel, config, late)
            super()._wait()
        super()._wait()


def is_scalar(*args: Any) -> bool:
    return not any(isinstance(arg, (PointerArg, tuple)) for arg in args)


class WritesBehindResults(FakeRuntime):
    """Each kernel writes one byte more than its results have."""

    def launch_on(self, stream, kernel, config, args):
        super().launch_on(stream, kernel, config, args)
        self._wait()
        for arg in args:
            if isinstance(arg, PointerArg) and arg.access is not Access.IN:
                end = arg.byte_offset + arg.nbytes
                if end < len(arg.buffer.data):
                    arg.buffer.data[end] ^= 0xFF


def memory_of(runtime, segment):
    return DeviceMemory(runtime, segment.device, threading.RLock())


class KeepsItsMemory(LaunchEach):
    def close(self):
        pass


class SealsAndLeaks(FakeRuntime):
    """Seals segments its own way, and never frees their memory."""

    def seal(self, segment):
        return lambda: KeepsItsMemory(memory_of(self, segment), segment)


class RaisesRaw(LaunchEach):
    def _start(self, launch, stream):
        self._runtime.launch(launch.kernel, launch.config, launch.args)


class SealsAndExplainsNothing(FakeRuntime):
    """Seals segments its own way, and lets the driver's errors out as they are."""

    def seal(self, segment):
        return lambda: RaisesRaw(memory_of(self, segment), segment)


class GrowsWithEveryLaunch(FakeRuntime):
    """Keeps a copy of what each launch was given."""

    def __init__(self):
        super().__init__()
        self.history = []

    def launch_on(self, stream, kernel, config, args):
        self.history.append(b"\1" * (256 << 10))  # written, or the system would give no memory for it
        super().launch_on(stream, kernel, config, args)


# -- packing


class Changing(ArgumentPacker):
    """Packs as the fake device does, and changes each argument then."""

    def __init__(self, packer, change):
        self.packer = packer
        self.change = change

    def pack(self, call, kernel):
        return tuple(replace(arg, value=self.change(arg.value)) for arg in self.packer.pack(call, kernel))


class Remembering(ArgumentPacker):
    """Packs a kernel's scalars once."""

    def __init__(self, packer):
        self.packer = packer
        self.known = {}

    def pack(self, call, kernel):
        packed = self.packer.pack(call, kernel)
        first = self.known.setdefault(kernel.name, packed)
        return tuple(
            arg if isinstance(arg.value, (TensorSpec, tuple)) else replace(arg, value=before.value)
            for arg, before in zip(packed, first, strict=True)
        )


def wraps_integers(value):
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return (value + 2**31) % 2**32 - 2**31 if is_number else value


def rounds_to_float32(value):
    import torch

    return torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value


def loses_the_sign_of_zero(value):
    return 0.0 if isinstance(value, float) and value == 0 else value


def takes_all_for_contiguous(value):
    if not isinstance(value, TensorSpec):
        return value
    strides, step = [], 1
    for size in reversed(value.shape):
        strides.insert(0, step)
        step *= size
    return replace(value, strides=tuple(strides))


def ignores_offsets(value):
    return replace(value, storage_offset=0) if isinstance(value, TensorSpec) else value


class BadlyPacked(FakeDevice):
    def __init__(self, change):
        super().__init__()
        self.change = change

    @hookimpl
    def kagent_argument_packer(self, info, config):
        packer = super().kagent_argument_packer(info, config)
        if packer is None:
            return None
        return Remembering(packer) if self.change is Remembering else Changing(packer, self.change)


# -- what it tells of itself


class BadlyDescribed(FakeDevice):
    def __init__(self, **changes):
        super().__init__()
        self.changes = changes

    @hookimpl
    def kagent_devices(self, config):
        return [replace(info, **self.changes) for info in super().kagent_devices(config)]


class NeverTheSame(FakeDevice):
    asked = 0

    @hookimpl
    def kagent_devices(self, config):
        self.asked += 1
        return [replace(info, name=f"Fake device, asked {self.asked} times") for info in super().kagent_devices(config)]
