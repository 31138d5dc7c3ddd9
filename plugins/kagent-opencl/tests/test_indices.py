"""Tensors with more elements than 32 bits count, without their memory: what kernels are written and launched with."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyopencl
import pytest

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.codegen.generic import GENERIC, GenericKernels
from kagent_core.codegen.loops.items import write_work_items
from kagent_core.codegen.rules import RULES
from kagent_core.errors import LaunchConfigError
from kagent_core.extract.launch_choice import MOST_ITEMS, ForcedLaunchConfig, choose_launch_config
from kagent_core.native import find_compiler, load
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig, OpCall, TensorSpec
from kagent_opencl.deriver import OpenClDeriver
from kagent_opencl.language import OpenClLanguage, PoclVectors
from tests.unit.builders import call, tensor

LIMIT = 2**31 - 1


class NarrowVectors(OpenClLanguage):
    """With vectors, and indices of 32 bits where they fit."""

    narrow_indices = True
    vector_width = 8
    vector_spelling = PoclVectors
    vectors_per_item = 4


class Narrow(OpenClLanguage):
    """With indices of 32 bits where they fit."""

    narrow_indices = True


def one_call(signature: str, arguments: dict[str, Any], made: TensorSpec) -> OpCall:
    """Describe a call."""
    return call(0, signature, arguments, [made])


def text(one: OpCall, language: type[OpenClLanguage]) -> str:
    """Return the kernel of a call."""
    generator = ExpressionGenerator(language(), write_work_items, generic=GenericKernels(GENERIC, RULES))
    return generator.source([one], {one.outputs[0].buffer}).text


def is_narrow(made: str) -> bool:
    """Whether a kernel's loops count in 32 bits."""
    counters = set(re.findall(r"for \((\w+) item = ", made))
    assert counters in ({"u32"}, {"i64"})
    return counters == {"u32"}


def relu(size: int, **how: Any) -> OpCall:
    return one_call("aten::relu", {"self": tensor(0, size, **how)}, tensor(1, size))


@pytest.mark.parametrize("language", [Narrow, NarrowVectors])
@pytest.mark.parametrize(
    ("one", "narrow"),
    [
        (relu(1000), True),
        (relu(LIMIT - 2**9), True),
        (relu(LIMIT + 1), False),
        (relu(2**40), False),
        (relu(3, strides=(2**30 - 1,)), True),  # few elements, far from each other
        (relu(3, strides=(2**31,)), False),
        (one_call("aten::sum.dim_IntList", {"self": tensor(0, 2**10, 2**10), "dim": (1,)}, tensor(1, 2**10)), True),
        (one_call("aten::sum.dim_IntList", {"self": tensor(0, 2**16, 2**16), "dim": (1,)}, tensor(1, 2**16)), False),
        (one_call("aten::sum.dim_IntList", {"self": tensor(0, 2**16, 2**16), "dim": (0,)}, tensor(1, 2**16)), False),
        (one_call("aten::amax", {"self": tensor(0, 2, 2**33), "dim": (1,)}, tensor(1, 2)), False),
        (
            one_call("aten::mm", {"self": tensor(0, 2**8, 2**8), "mat2": tensor(1, 2**8, 2**8)}, tensor(2, 2**8, 2**8)),
            True,
        ),
        (
            one_call("aten::mm", {"self": tensor(0, 2**17, 64), "mat2": tensor(1, 64, 2**17)}, tensor(2, 2**17, 2**17)),
            False,
        ),
        (one_call("aten::mm", {"self": tensor(0, 64, 2**31), "mat2": tensor(1, 2**31, 64)}, tensor(2, 64, 64)), False),
    ],
)
def test_indices_are_as_wide_as_they_must_be(one: OpCall, narrow: bool, language: type[OpenClLanguage]) -> None:
    assert is_narrow(text(one, language)) is narrow


@pytest.mark.parametrize("size", [1000, 2**33])
def test_by_default_indices_have_64_bits(size: int) -> None:
    assert not is_narrow(text(relu(size), OpenClLanguage))


class Stated:
    """A device that says what it is told to."""

    version = name = extensions = ""
    platform = SimpleNamespace(version="")
    preferred_vector_width_float = 1
    max_work_group_size, local_mem_size = 256, 2**15

    def __init__(self, kind: int) -> None:
        self.type = kind


@pytest.mark.parametrize(
    ("kind", "narrow"), [("CPU", False), ("GPU", True), ("ACCELERATOR", True)], ids=lambda value: str(value)
)
def test_a_processor_counts_in_64_bits_and_other_devices_in_32(
    kind: str, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Stated(getattr(pyopencl.device_type, kind))
    monkeypatch.setattr("kagent_opencl.platforms.device_of", lambda info: device)
    language = OpenClLanguage.of(DeviceInfo(Device("opencl", 0), kind))
    made = ExpressionGenerator(language, write_work_items).source([relu(1000)], {1}).text
    assert is_narrow(made) is narrow
    assert language.groups is None if kind == "CPU" else language.groups is not None


def test_a_kernel_for_small_tensors_is_none_for_large_ones() -> None:
    assert text(relu(1000), Narrow) != text(relu(2**33), Narrow)


def test_offsets_do_not_count() -> None:
    """The first element is where the kernel's pointer is, whose offset is an int64."""
    made = text(relu(1000, offset=2**40), Narrow)
    assert is_narrow(made)
    assert re.search(r"\bi64 \w+_first\b", made)


# -- the arithmetic of what was written, run by the processor

STEPS = """
typedef int i32; typedef long i64; typedef unsigned int u32;
#define get_global_id(axis) table[1]
#define get_global_size(axis) table[2]
void steps_of(long *table) {{
    long n0 = table[0], count = 0;
    {head}
        if (count == 4) break;
        table[4 + count++] = item;
    }}
    table[3] = count;
}}
"""


def steps_of(size: int, items: int, item: int, folder: Path) -> list[int]:
    """Return the first four steps that one of some work-items does, in a kernel for tensors of a size."""
    head = re.search(r"for \(\w+ item = .*\{", text(relu(size), Narrow))
    assert head is not None
    compiler = find_compiler()
    assert compiler is not None
    table = (ctypes.c_long * 8)(size, item, items)
    load(STEPS.format(head=head[0]), folder, compiler).function("steps_of")(ctypes.addressof(table))
    return list(table[4 : 4 + table[3]])


@pytest.mark.parametrize(
    ("size", "items", "item", "expected"),
    [
        (2**33, 2**32, 5, [5, 2**32 + 5]),
        (2**33, 2**33, 2**33 - 1, [2**33 - 1]),
        (LIMIT, MOST_ITEMS, LIMIT - 1, [LIMIT - 1]),  # a step more is far beyond 2**31, and still beyond the end
        (LIMIT, MOST_ITEMS, 0, [0]),
        (LIMIT, MOST_ITEMS, LIMIT, []),
        (LIMIT, 2**30, 2**30 - 2, [2**30 - 2, 2**31 - 2]),
    ],
)
def test_every_step_is_done_once(size: int, items: int, item: int, expected: list[int], tmp_path: Path) -> None:
    assert steps_of(size, items, item, tmp_path) == expected


def test_steps_of_more_items_would_come_around(tmp_path: Path) -> None:
    """Which is why a launch never has them."""
    assert steps_of(LIMIT, MOST_ITEMS + 1024, LIMIT - 1, tmp_path) != [LIMIT - 1]


# -- launches

INFO = DeviceInfo(Device("opencl", 0), "GPU", max_threads_per_block=1024, compute_units=4)


def kernel_of(items: int) -> KernelDescriptor:
    return KernelDescriptor("aten::relu", "relu", source="", items=items)


def test_a_launch_of_more_items_than_a_kernel_counts_is_refused() -> None:
    forced = {"relu": ForcedLaunchConfig("relu", LaunchConfig((2**22, 1, 1), (1024, 1, 1)))}
    with pytest.raises(LaunchConfigError, match=f"{2**32} work-items, a generated kernel counts {MOST_ITEMS} at most"):
        choose_launch_config([relu(LIMIT)], kernel_of(LIMIT), INFO, OpenClDeriver(), forced=forced)
    forced["relu"].config = LaunchConfig((2**21, 1, 1), (1024, 1, 1))
    choice = choose_launch_config([relu(LIMIT)], kernel_of(LIMIT), INFO, OpenClDeriver(), forced=forced)
    assert choice.config == forced["relu"].config


def test_a_derived_launch_has_as_many_as_a_kernel_counts() -> None:
    class Uneven(OpenClDeriver):
        def derive(self, *given: Any) -> LaunchConfig | None:
            return LaunchConfig((2**22, 1, 1), (768, 1, 1))

    choice = choose_launch_config([relu(LIMIT)], kernel_of(LIMIT), INFO, Uneven())
    assert choice.config is not None
    assert MOST_ITEMS - 768 < choice.config.grid[0] * 768 <= MOST_ITEMS
    by_hand = KernelDescriptor("aten::relu", "relu", source="")
    assert choose_launch_config([relu(LIMIT)], by_hand, INFO, Uneven()).config == LaunchConfig(
        (2**22, 1, 1), (768, 1, 1)
    )
