"""Segments as Python functions: what they look like, whose memory they use, how they fail."""

from __future__ import annotations

import gc
import linecache
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.errors import KernelExecutionError
from kagent_core.specs import TaskFinished
from kagent_cpu.replay import CpuSegment

from .builders import aten, segment_of

OPTIONS = {"device": "cpu", "generated_kernels": "off"}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="kagent", fullgraph=True, dynamic=False, options={**OPTIONS, **options})


# -- source


def test_the_source_is_a_line_per_task_and_says_what_it_makes() -> None:
    segment = segment_of(lambda x, w: aten.relu(aten.mm(aten.sin(x), w)), torch.randn(3, 4), torch.randn(4, 5))
    text = "\n".join(segment.source.lines)
    code = [line.split("#")[0].rstrip() for line in segment.source.lines]
    assert code[0] == "def replay(env):"
    calls = [line for line in code if "(" in line and "k_aten" in line]
    assert [re.search(r"k_aten__(\w+?)_\d", line)[1] for line in calls] == ["sin", "mm", "relu"]  # type: ignore[index]
    assert "out=t0" in calls[0]  # into planned memory
    assert re.search(r"\(t0, b\d, out=t1\)", calls[1])
    assert "out=" not in calls[2]  # the caller keeps it
    assert re.search(r"# mm\w*: f32\[3, 5\]", text)
    compile(text, "source", "exec")


def test_a_traceback_shows_the_source_while_the_segment_lives() -> None:
    segment = segment_of(lambda x: aten.relu(x), torch.randn(3))
    filename = segment.filename
    assert linecache.getline(filename, 1) == "def replay(env):\n"
    del segment
    gc.collect()
    assert linecache.getline(filename, 1) == ""


def test_every_line_knows_its_task() -> None:
    segment = segment_of(lambda x: aten.exp(aten.cos(aten.sin(x))), torch.randn(3))
    for lines, tasks in (
        (segment.source.lines, segment.source.line_tasks),
        (segment.source.observed_lines, segment.source.observed_line_tasks),
    ):
        named = {tasks[number]: line for number, line in enumerate(lines, 1) if "k_aten" in line}
        assert [re.search(r"k_aten__([a-z]+)", named[task])[1] for task in range(3)] == ["sin", "cos", "exp"]  # type: ignore[index]


def test_an_empty_program_is_a_function_that_does_nothing() -> None:
    function = compiled(lambda x: x.t())
    x = torch.randn(3, 4)
    assert function(x).equal(x.t())
    assert function(x).data_ptr() == x.data_ptr()


# -- memory


def planned_tensors(instance: CpuSegment) -> dict[str, torch.Tensor]:
    names = instance._compiled.source.planned.values()
    return {name: instance._globals[name] for name in names}


def test_planned_buffers_share_the_arena_but_no_storage() -> None:
    compiled_segment = segment_of(lambda x: aten.add(aten.mm(aten.sin(x), aten.cos(x)), aten.exp(x)), torch.randn(8, 8))
    segment = compiled_segment.segment
    instance = CpuSegment(compiled_segment)
    tensors = planned_tensors(instance)
    assert len(tensors) == 4
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    assert max(addresses) - min(addresses) < segment.arena_nbytes
    for tensor in tensors.values():
        assert tensor.data_ptr() % 64 == 0
    assert len({tensor.untyped_storage()._cdata for tensor in tensors.values()}) == len(tensors)
    assert all(tensor.untyped_storage().nbytes() == 8 * 8 * 4 for tensor in tensors.values())


def test_views_of_a_planned_buffer_share_its_storage() -> None:
    compiled_segment = segment_of(lambda x: aten.mm(y := aten.sin(x), aten.t(y)), torch.randn(3, 4))
    tensors = list(planned_tensors(CpuSegment(compiled_segment)).values())
    assert len(tensors) == 2
    assert tensors[0].untyped_storage()._cdata == tensors[1].untyped_storage()._cdata
    assert {tensor.stride() for tensor in tensors} == {(4, 1), (1, 4)}


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (4, 4)])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_a_kernel_that_asks_whether_its_results_alias(shape: tuple[int, int], mode: str) -> None:
    """With both results on one storage, ``linalg_qr.out`` takes one for the other."""
    x = torch.randn(shape)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, r = torch.linalg.qr(x, mode=mode)
        return q + 1, r + 1

    torch.testing.assert_close(compiled(function)(x), function(x))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex128])
def test_a_kernel_that_wants_a_storage_of_whole_elements(dtype: torch.dtype) -> None:
    """``slice_scatter`` copies the storage of its argument, even when that is empty."""
    x, y = torch.ones(0, 3, 6, dtype=dtype), torch.ones(0, 3, 2, dtype=dtype)
    segment = segment_of(lambda x, y: aten.clone(aten.slice_scatter(aten.clone(x), y, 2, 1, 3)), x, y)
    environment = dict(enumerate([x, y]))
    CpuSegment(segment).run(environment)
    (result,) = (environment[buffer] for buffer in segment.segment.exports)
    assert result.shape == (0, 3, 6)


def test_planned_memory_outlives_the_arenas_owner() -> None:
    tensors = planned_tensors(CpuSegment(segment_of(lambda x: aten.exp(aten.sin(x)), torch.randn(100_000))))
    (tensor,) = tensors.values()
    gc.collect()
    tensor.fill_(3)
    torch.empty(100_000).fill_(4)
    assert tensor.sum().item() == 300_000


def test_results_are_the_callers_own() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).sin()
        return y, y.t(), y.cos(), y.clone()

    through_kagent = compiled(function)
    first = torch.randn(4, 5)
    kept = through_kagent(first)
    copies = [tensor.clone() for tensor in kept]
    for _ in range(3):
        through_kagent(torch.randn(4, 5))
    for tensor, copy in zip(kept, copies, strict=True):
        assert tensor.equal(copy)
    torch.testing.assert_close(kept, function(first))


def test_memory_is_used_again_within_a_run() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = aten.sin(x)
        return x

    segment = segment_of(chain, torch.randn(1000)).segment
    assert segment.arena_nbytes <= 2 * 4032  # two buffers take turns


# -- failures


def fetch(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = x * 2
    picked = y[index]  # here it fails
    return picked + 1


def line_of_failure() -> int:
    source = fetch.__code__.co_firstlineno
    return source + 2


@pytest.fixture(params=["off", "auto"])
def generated(request: pytest.FixtureRequest) -> str:
    """ATen's kernels say themselves what is wrong; generated ones report, and eager PyTorch says it."""
    return str(request.param)


def test_a_failure_names_operator_shapes_dtypes_and_the_users_line(generated: str) -> None:
    function = compiled(fetch, generated_kernels=generated)
    x, index = torch.randn(3, 4), torch.tensor([0, 2])
    assert function(x, index).equal(fetch(x, index))
    with pytest.raises(KernelExecutionError) as caught:
        function(x, torch.tensor([0, 7]))
    message = str(caught.value)
    assert "aten::index.Tensor failed on cpu with IndexError" in message
    assert "index 7 is out of bounds" in message
    assert "f32[3, 4]" in message
    assert "i64[2]" in message
    assert f"{__file__}:{line_of_failure()}: picked = y[index]" in message
    assert isinstance(caught.value.__cause__, IndexError)
    assert function(x, index).equal(fetch(x, index))


def test_code_that_catches_eagers_exception_goes_on_working(generated: str) -> None:
    function = compiled(fetch, generated_kernels=generated)
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        fetch(torch.randn(3, 4), torch.tensor([9]))
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        function(torch.randn(3, 4), torch.tensor([9]))


def test_a_failure_in_an_observed_run_is_told_alike(generated: str) -> None:
    with kagent_core.use_plugin(Observer()):
        function = compiled(fetch, generated_kernels=generated)
        with pytest.raises(IndexError) as caught:
            function(torch.randn(3, 4), torch.tensor([9]))
        assert f"{__file__}:{line_of_failure()}" in str(caught.value)
        assert function(torch.ones(3, 4), torch.tensor([1])).equal(torch.full((1, 4), 3.0))


def test_many_threads_fail_and_succeed_side_by_side(generated: str) -> None:
    function = compiled(fetch, generated_kernels=generated)
    x = torch.randn(3, 4)
    expected = fetch(x, torch.tensor([0, 2]))
    function(x, torch.tensor([0, 2]))
    wrong: list[str] = []

    def work(fails: bool) -> None:
        for _ in range(50):
            try:
                result = function(x, torch.tensor([0, 9 if fails else 2]))
            except IndexError:
                if not fails:
                    wrong.append("failed")
            else:
                if fails or not result.equal(expected):
                    wrong.append("succeeded")

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- observation and threads


class Observer:
    """Notes every task that has finished."""

    def __init__(self) -> None:
        self.events: list[TaskFinished] = []

    @kagent_core.hookimpl
    def kagent_contract_version(self) -> int:
        """Say which contract this plugin was written for."""
        return 1

    @kagent_core.hookimpl
    def kagent_task_finished(self, event: TaskFinished) -> None:
        """Take a note."""
        self.events.append(event)


def test_an_observed_run_tells_every_task_and_gives_the_same() -> None:
    observer = Observer()
    x = torch.randn(64, 64)
    with kagent_core.use_plugin(observer):
        result = compiled(lambda x: (x @ x).sin().sum(0))(x)
    assert result.equal((x @ x).sin().sum(0))
    signatures = [event.task.kernel.signature for event in observer.events]
    assert signatures == ["aten::mm", "aten::sin", "aten::sum.dim_IntList"]
    assert all(event.elapsed_ms > 0 and event.error is None for event in observer.events)


@pytest.fixture
def thread_counts() -> Iterator[list[int]]:
    """How many threads torch was set to whenever ``kagent_test_replay::note`` ran."""
    seen: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if x.numel() == 0:
            raise ValueError("nothing to note")
        return x.clone()

    with torch.library._scoped_library("kagent_test_replay", "DEF") as library:
        library.define("note(Tensor x) -> Tensor")
        library.impl("note", note, "CPU")
        library.impl("note", lambda x: torch.empty_like(x), "Meta")
        yield seen


def test_the_threads_option_holds_within_a_call(thread_counts: list[int]) -> None:
    before = torch.get_num_threads()
    x = torch.randn(3)
    for threads in (before + 1, before + 2):
        torch._dynamo.reset()
        function = compiled(lambda x: torch.ops.kagent_test_replay.note(x) + 1, threads=threads)
        assert function(x).equal(x + 1)
        assert thread_counts.pop() == threads
        assert torch.get_num_threads() == before
        with pytest.raises(ValueError, match="nothing to note"):
            function(torch.randn(0))
        assert thread_counts.pop() == threads
        assert torch.get_num_threads() == before


def test_without_the_option_torchs_setting_holds(thread_counts: list[int]) -> None:
    function = compiled(lambda x: torch.ops.kagent_test_replay.note(x) + 1)
    function(torch.randn(3))
    assert thread_counts == [torch.get_num_threads()]
