"""The arena: buffers that live at the same time never share bytes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kagent_core.execute.arena import ALIGNMENT, plan_arena
from kagent_core.extract.stages import memory_ranges
from kagent_core.specs import KernelDescriptor

from .builders import buffer, call, relu, task, tensor

FUNCTIONAL = KernelDescriptor("aten::relu", "functional", allocates=True)


@st.composite
def programs(draw) -> tuple[list[int], list[list[int]], list[int]]:
    """Element counts of buffers, and per task the buffers that it reads; task n makes buffer n + 1."""
    length = draw(st.integers(1, 20))
    elements = draw(st.lists(st.integers(0, 200), min_size=length + 1, max_size=length + 1))
    reads = [draw(st.lists(st.integers(0, n), min_size=1, max_size=3)) for n in range(length)]
    exports = draw(st.lists(st.integers(1, length), max_size=3, unique=True))
    return elements, reads, exports


def tasks_of(elements: Sequence[int], reads: Sequence[Sequence[int]]):
    """Tasks that concatenate what they read into a new buffer."""
    tasks = []
    for number, sources in enumerate(reads):
        made = tensor(number + 1, elements[number + 1])
        inputs = tuple(tensor(source, elements[source]) for source in sources)
        calls = (call(number, "aten::cat", {"tensors": inputs}, [made]),)
        read, written = memory_ranges(calls)
        tasks.append(task(number, reads=read, writes=written, calls=calls))
    return tasks, [buffer(n, 4 * count) for n, count in enumerate(elements)]


def lifetimes(reads: Sequence[Sequence[int]], kept: Sequence[int]) -> dict[int, tuple[int, int]]:
    """First and last task that touches each made buffer, by definition."""
    found = {n + 1: (n, n) for n in range(len(reads))}
    for number, sources in enumerate(reads):
        for source in sources:
            if source:
                found[source] = (found[source][0], number)
    return {b: (first, len(reads) if b in kept else last) for b, (first, last) in found.items()}


@settings(max_examples=300, deadline=None)
@given(programs(), st.booleans())
def test_lifetimes_that_overlap_share_no_byte(program, keep_exports):
    elements, reads, exports = program
    tasks, buffers = tasks_of(elements, reads)
    plan = plan_arena(tasks, buffers, exports, keep_exports)
    lives = lifetimes(reads, exports if keep_exports else ())

    expected = set(range(1, len(reads) + 1)) - (set() if keep_exports else set(exports))
    assert plan.offsets.keys() == expected
    for one, begin in plan.offsets.items():
        assert begin % ALIGNMENT == 0
        assert begin + buffers[one].nbytes <= plan.nbytes
        for other, other_begin in plan.offsets.items():
            together = lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]
            if one != other and together:
                sizes = max(buffers[one].nbytes, 1), max(buffers[other].nbytes, 1)
                assert begin + sizes[0] <= other_begin or other_begin + sizes[1] <= begin, (one, other)

    separate = sum(-(-max(buffers[b].nbytes, 1) // ALIGNMENT) * ALIGNMENT for b in plan.offsets)
    assert plan.nbytes <= separate


def chain(length: int, elements: int = 100):
    """Each task reads the result of the one before."""
    return tasks_of([elements] * (length + 1), [[n] for n in range(length)])


def test_a_chain_needs_two_places():
    tasks, buffers = chain(10)
    plan = plan_arena(tasks, buffers, exports=[10], keep_exports=False)
    assert len(set(plan.offsets.values())) == 2
    assert plan.nbytes == 2 * 448  # 400 bytes, rounded up


def test_kept_exports_live_to_the_end_of_the_run():
    tasks, buffers = chain(6)
    plan = plan_arena(tasks, buffers, exports=[1, 6], keep_exports=True)
    others = [offset for number, offset in plan.offsets.items() if number != 1]
    assert plan.offsets[1] not in others


def test_exports_that_are_made_anew_are_not_planned():
    tasks, buffers = chain(3)
    plan = plan_arena(tasks, buffers, exports=[3], keep_exports=False)
    assert plan.offsets.keys() == {1, 2}


def test_what_a_kernel_allocates_itself_is_not_planned():
    made = relu(0, tensor(0, 8), tensor(1, 8)), relu(1, tensor(1, 8), tensor(2, 8))
    tasks = []
    for one, kernel in zip(made, (FUNCTIONAL, None), strict=True):
        reads, writes = memory_ranges([one])
        tasks.append(task(one.id, reads=reads, writes=writes, calls=[one], kernel=kernel))
    plan = plan_arena(tasks, [buffer(n, 32) for n in range(3)], exports=[], keep_exports=False)
    assert plan.offsets.keys() == {2}


def test_what_is_only_read_or_written_in_place_is_not_planned():
    target = tensor(0, 8)
    write = call(0, "aten::copy_", {"self": target, "src": tensor(1, 8)}, [target], written=[target])
    reads, writes = memory_ranges([write])
    tasks = [task(0, reads=reads, writes=writes, calls=[write])]
    plan = plan_arena(tasks, [buffer(0, 32), buffer(1, 32)], exports=[0], keep_exports=True)
    assert plan.offsets == {}
    assert plan.nbytes == 0


def test_a_result_that_nobody_reads_has_a_place_while_it_is_made():
    tasks, buffers = tasks_of([8, 8, 8], [[0], [0]])
    plan = plan_arena(tasks, buffers, exports=[], keep_exports=False)
    assert plan.offsets == {1: 0, 2: 0}
    assert plan.nbytes == ALIGNMENT


def test_no_tasks_need_no_memory():
    assert plan_arena([], [], [], keep_exports=True).nbytes == 0
