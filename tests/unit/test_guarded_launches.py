"""Launches between guard zones, and sizes at the edges of blocks: what small samples of a kernel do not show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kagent_core import use_plugin
from kagent_core.config import load_config
from kagent_core.device import PointerArg, Runtime
from kagent_core.kernels import kernel
from kagent_core.session import session_for
from kagent_core.specs import Access, DType, KernelDescriptor, LaunchConfig, TensorSpec
from kagent_core.testing.edge_samples import EDGES, at_edges
from kagent_core.testing.guarded_launches import GUARD_NBYTES, GuardedLaunches
from kagent_core.testing.kernel_check import KernelCheck, check_kernel
from kagent_core.testing.operator_samples import operator_calls

from ..driver_device import DriverDevice

NEGATIVE = """
KERNEL void negative(const float *self, float *out, long numel) {{
    {0}
}}
"""
PROTOTYPE = "void negative(const float *self, float *out, long numel)"
RIGHT = "for (long i = item_number(); i < numel; i += item_count()) out[i] = -self[i];"
CHECKED = "long i = item_number(); if (i < numel) out[i] = -self[i];"
UNCHECKED = "long i = item_number(); out[i] = -self[i < numel ? i : 0];"


@pytest.fixture
def device() -> Iterator[str]:
    with use_plugin(DriverDevice()):
        yield "driver:0"


def checked(body: str, device: str) -> KernelCheck:
    made = kernel("aten::neg", source=NEGATIVE.format(body), prototype=PROTOTYPE, device=device)
    made.unregister()
    return check_kernel(made, load_config(), samples=2)


@pytest.mark.parametrize("body", [RIGHT, CHECKED], ids=["strides", "a bounds check"])
def test_right_kernels_are_right_at_every_size(body: str, device: str) -> None:
    found = checked(body, device)
    assert (found.wrong, found.errors, found.right) == ([], {}, True)


def test_a_kernel_without_a_bounds_check_is_wrong_where_a_block_sticks_out(device: str) -> None:
    """Its results are right, and the memory behind them is not: 400 elements are computed by two blocks of 256."""
    found = checked(UNCHECKED, device)
    assert not found.right
    told = [str(wrong.error) for wrong in found.wrong if wrong.call.variant == "as it came"]
    assert told[:1] == [f"{4 * 112} bytes behind f32[20, 20] were written"]


def test_threads_to_spare_at_the_edges_of_blocks(device: str) -> None:
    """Kernels that are right for up to a block of elements, as small samples often are."""
    found = checked(f"if (numel < 512) {{ {RIGHT} }} else {{ {UNCHECKED} }}", device)
    assert [wrong.call.variant for wrong in found.wrong] == [f"{n} elements" for n in EDGES if n % 256]
    assert "4 bytes behind" in str(found.wrong[0].error)  # 1023 elements, 1024 threads
    assert f"{4 * 255} bytes behind" in str(found.wrong[1].error)  # 1025 elements, 5 blocks


def test_a_kernel_that_is_wrong_for_many_elements_only(device: str) -> None:
    found = checked("if (item_number() == 0) for (long i = 0; i < numel && i < 1024; i++) out[i] = -self[i];", device)
    assert [wrong.call.variant for wrong in found.wrong] == [f"{n} elements" for n in EDGES if n > 1024]


def test_a_kernel_that_writes_before_its_result(device: str) -> None:
    found = checked(f"{CHECKED} if (i == 0) out[-1] = 0;", device)
    assert "4 bytes before" in str(found.wrong[0].error)


# -- sizes


def test_calls_at_edges_have_so_many_elements() -> None:
    base = max(operator_calls("aten::neg", [torch.float32]), key=lambda call: call.tensors[0].numel())
    assert [call.tensors[0].numel() for call in at_edges(base)] == [*EDGES]


def test_where_one_dimension_is_too_few_there_are_about_so_many() -> None:
    base = max(operator_calls("aten::mm", [torch.float32]), key=lambda call: call.tensors[0].numel())
    sizes = [max(tensor.numel() for tensor in call.tensors) for call in at_edges(base)]
    assert len(sizes) == len(EDGES)
    assert all(size > 500 for size in sizes)


# -- launches

SPEC = TensorSpec(DType("float32", 4), (4,), (1,), 0, 0)


class Recorder(Runtime):
    """Memory, and launches that call a function."""

    def allocate(self, nbytes: int) -> bytearray:
        return bytearray(nbytes)

    def free(self, buffer: bytearray) -> None:
        buffer.clear()

    def copy_in(self, buffer: bytearray, byte_offset: int, data: memoryview) -> None:
        buffer[byte_offset : byte_offset + data.nbytes] = bytes(data)

    def copy_out(self, buffer: bytearray, byte_offset: int, data: memoryview) -> None:
        data[:] = buffer[byte_offset : byte_offset + data.nbytes]

    def load(self, kernel: KernelDescriptor) -> Any:
        return kernel

    def launch(self, kernel: Any, config: LaunchConfig, args: Any) -> None:
        self.launch_on(0, kernel, config, args)

    def launch_on(self, stream: int, kernel: Any, config: LaunchConfig, args: Any) -> None:
        kernel(*args)

    def synchronize(self) -> None:
        pass


def test_what_is_written_comes_back_and_what_is_not_stays() -> None:
    runtime = Recorder()
    guards = GuardedLaunches(runtime)
    memory = bytearray(range(100))
    seen: list[PointerArg] = []

    def kernel(source: PointerArg, target: PointerArg) -> None:
        seen[:] = [source, target]
        target.buffer[target.byte_offset : target.byte_offset + 8] = b"\x01" * 8

    given = [PointerArg(memory, 0, SPEC), PointerArg(memory, 20, SPEC, Access.OUT)]
    with guards.watching():
        runtime.launch(kernel, LaunchConfig(), given)
        assert runtime.prepare(kernel, LaunchConfig(), given) is None
    assert memory == bytes(range(20)) + b"\x01" * 8 + bytes(range(28, 100))
    assert seen[0] is given[0]
    assert (seen[1].byte_offset, seen[1].byte_offset % 256) == (GUARD_NBYTES + 20, 20)
    assert guards.overruns == []
    assert "launch" not in vars(runtime)


def test_what_is_written_beside_a_tensor_is_told_once() -> None:
    runtime = Recorder()
    guards = GuardedLaunches(runtime)

    def kernel(target: PointerArg) -> None:
        target.buffer[target.byte_offset + 16] ^= 0xFF
        target.buffer[target.byte_offset - 1] ^= 0xFF

    with guards.watching():
        runtime.launch(kernel, LaunchConfig(), [PointerArg(bytearray(32), 0, SPEC, Access.INOUT)])
    assert [text.partition(" f32")[0] for text in guards.overruns] == ["1 bytes before", "1 bytes behind"]


def test_memory_that_another_argument_is_read_from_stays_where_it_is() -> None:
    runtime, memory = Recorder(), bytearray(32)
    guards = GuardedLaunches(runtime)
    given = [PointerArg(memory, 0, SPEC), PointerArg(memory, 8, SPEC, Access.OUT)]
    seen: list[Any] = []
    with guards.watching():
        runtime.launch(lambda *args: seen.extend(args), LaunchConfig(), given)
    assert seen == given


def test_the_session_is_as_it_was(device: str) -> None:
    checked(RIGHT, device)
    session = session_for(load_config({"device": device}))
    assert not {"launch", "prepare"} & set(vars(session.executor_for(session.target.device).opened.runtime))
