"""One buffer for the scalars of a plan: alignment, addresses, patches and lifetime."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.errors import PackingError
from kagent_core.extract.parameter_buffer import ParameterBuffer, collect_parameters
from kagent_core.prototype.abi import Abi
from kagent_core.specs import Access, KernelDescriptor, PackedArg

from .builders import task, tensor

TYPES = {
    "bool": (ctypes.c_bool, True),
    "int8_t": (ctypes.c_int8, -3),
    "uint16_t": (ctypes.c_uint16, 40000),
    "int32_t": (ctypes.c_int32, -(2**31)),
    "uint64_t": (ctypes.c_uint64, 2**64 - 1),
    "float": (ctypes.c_float, 1.5),
    "double": (ctypes.c_double, math.pi),
    "int16_t[3]": (ctypes.c_int16 * 3, (1, -2, 3)),
    "sizes8": (ctypes.c_int64 * 8, (9, 8, 7, 6, 5, 4, 3, 2)),
}


def filled(*spellings):
    buffer = ParameterBuffer()
    slots = [buffer.append(spelling, TYPES[spelling][1], f"parameter {i}") for i, spelling in enumerate(spellings)]
    buffer.freeze()
    return buffer, slots


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(list(TYPES)), max_size=20))
def test_values_lie_as_in_a_struct(spellings):
    buffer, slots = filled(*spellings)
    layout = type(
        "Layout", (ctypes.Structure,), {"_fields_": [(f"f{i}", TYPES[s][0]) for i, s in enumerate(spellings)]}
    )
    there = layout.from_buffer_copy(bytes(buffer.memory).ljust(ctypes.sizeof(layout), b"\0"))
    for i, (spelling, slot) in enumerate(zip(spellings, slots, strict=True)):
        field, value = getattr(layout, f"f{i}"), TYPES[spelling][1]
        assert (slot.offset, slot.nbytes) == (field.offset, field.size)
        seen = getattr(there, f"f{i}")
        assert (tuple(seen) if isinstance(value, tuple) else seen) == value
        assert buffer.value(slot) == value


@pytest.mark.parametrize("spelling", TYPES)
def test_an_address_leads_to_the_value_and_is_aligned(spelling):
    buffer, slots = filled("bool", spelling, "bool")
    address = buffer.address(slots[1])
    assert address % ctypes.alignment(TYPES[spelling][0]) == 0
    assert buffer.address(slots[0]) % 64 == 0
    there = TYPES[spelling][0].from_address(address)
    value = TYPES[spelling][1]
    assert (tuple(there) if isinstance(value, tuple) else there.value) == value


def test_alignments_of_the_abi():
    buffer = ParameterBuffer(Abi(alignments={"int32_t": 16}))
    assert [buffer.append("int", 1).offset, buffer.append("int", 2).offset] == [0, 16]


def test_patching_changes_the_value_in_place_for_all_who_look_at_it():
    buffer, [first, second, third] = filled("int32_t", "float", "int16_t[3]")
    views = [buffer.view(slot) for slot in (first, second, third)]
    addresses = [buffer.address(slot) for slot in (first, second, third)]
    buffer.patch(second, 0.1)
    assert buffer.value(second) == ctypes.c_float.from_address(addresses[1]).value == ctypes.c_float(0.1).value
    assert bytes(views[1]) == bytes(ctypes.c_float(0.1))
    assert (buffer.value(first), buffer.value(third)) == (TYPES["int32_t"][1], (1, -2, 3))
    buffer.patch(third, (7,))
    assert list(memoryview(views[2]).cast("h")) == [7, 0, 0]
    assert [buffer.address(slot) for slot in (first, second, third)] == addresses


def test_a_patch_pads_as_the_slot_says():
    buffer = ParameterBuffer()
    slot = buffer.append("int8_t[4]", (5, 6), padding=1)
    buffer.freeze()
    assert buffer.value(slot) == (5, 6, 1, 1)
    buffer.patch(slot, (2,))
    assert buffer.value(slot) == (2, 1, 1, 1)


@pytest.mark.parametrize("value", [2**31, 1.0, None, "x", (1,)])
def test_a_patch_is_checked_and_a_refused_one_changes_nothing(value):
    buffer, [slot] = filled("int32_t")
    with pytest.raises(PackingError, match=r"^parameter 0 is a int32_t"):
        buffer.patch(slot, value)
    assert buffer.value(slot) == TYPES["int32_t"][1]


def test_views_are_read_only():
    buffer, [slot] = filled("int32_t")
    for view in (buffer.view(slot), buffer.memory):
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1


def test_a_view_keeps_the_memory_alive():
    buffer, [slot] = filled("double")
    view = buffer.view(slot)
    del buffer
    gc.collect()
    [bytearray(1 << 12) for _ in range(64)]
    assert bytes(view) == bytes(ctypes.c_double(math.pi))


def test_a_copy_has_memory_of_its_own():
    buffer, [first, second] = filled("int8_t", "double")
    other = buffer.copy()
    assert bytes(other.memory) == bytes(buffer.memory)
    other.patch(second, 2.0)
    assert (buffer.value(second), other.value(second)) == (math.pi, 2.0)
    assert other.address(first) != buffer.address(first)
    assert other.frozen


def test_before_and_after_freezing():
    buffer = ParameterBuffer()
    slot = buffer.append("int32_t", 5)
    assert (buffer.frozen, buffer.nbytes) == (False, 4)
    for use in (
        lambda: buffer.memory,
        lambda: buffer.view(slot),
        lambda: buffer.address(slot),
        lambda: buffer.patch(slot, 1),
        lambda: buffer.value(slot),
        buffer.copy,
    ):
        with pytest.raises(PackingError, match="before it has its memory"):
            use()
    buffer.freeze()
    address = buffer.address(slot)
    buffer.freeze()
    assert (buffer.frozen, buffer.nbytes, buffer.address(slot), buffer.value(slot)) == (True, 4, address, 5)
    for late in (
        lambda: buffer.append("int", 1, "parameter 'n'"),
        lambda: buffer.append_bytes("int", b"1234", "parameter 'n'"),
    ):
        with pytest.raises(PackingError, match="parameter 'n' comes too late"):
            late()


def test_an_empty_buffer():
    buffer = ParameterBuffer()
    buffer.freeze()
    assert (buffer.nbytes, bytes(buffer.memory)) == (0, b"")


def test_appended_values_are_checked():
    buffer = ParameterBuffer()
    with pytest.raises(PackingError, match="is a uint8_t"):
        buffer.append("uint8_t", 256, "parameter 'n' of kernel 'k'")
    with pytest.raises(PackingError, match="'n' is a int32_t of 4 bytes, but 3 bytes came"):
        buffer.append_bytes("int", b"123", "parameter 'n'")
    assert buffer.nbytes == 0


def test_the_parameters_of_tasks():
    first = (
        PackedArg("self", tensor(0, 2), Access.IN, type="const float*"),
        PackedArg("n", 7, type="uint8_t", data=b"\7"),
        PackedArg("bias", None, type="const float*", data=bytes(8)),
    )
    second = (PackedArg("dim", 3), PackedArg("m", -1, type="int32_t", data=b"\xff\xff\xff\xff"))
    tasks = [dataclasses.replace(task(i), args=args) for i, args in enumerate((first, second))]
    buffer, slots = collect_parameters(tasks)
    assert [[None if slot is None else slot.offset for slot in one] for one in slots] == [
        [None, 0, 8],
        [None, 16],
    ]
    assert buffer.frozen
    assert [buffer.value(slot) for one in slots for slot in one if slot is not None] == [7, None, -1]
    with pytest.raises(PackingError, match="parameter 'm' of kernel 'toy_relu' for aten::relu is a int32_t"):
        buffer.patch(slots[1][1], 2**31)


def test_collecting_follows_the_abi():
    arg = PackedArg("n", 1, type="long", data=bytes(4))
    kernel = KernelDescriptor("aten::relu", "k")
    buffer, [[slot]] = collect_parameters(
        [dataclasses.replace(task(0, kernel=kernel), args=(arg,))], Abi(long_nbytes=4)
    )
    assert (slot.nbytes, buffer.nbytes) == (4, 4)
