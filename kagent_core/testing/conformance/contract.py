"""Level 0: every method of the device's runtime, by itself and through the core, as a session opens it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kagent_core.errors import KagentError, KernelExecutionError
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig
from kagent_core.testing.compare import assert_same
from kagent_core.testing.conformance import recording
from kagent_core.testing.conformance.case import CannotRunError, Case, Ran, Target
from kagent_core.testing.conformance.checks import Checks
from kagent_core.testing.conformance.compared import assert_bytes, noise
from kagent_core.testing.conformance.opened import Opened, opened
from kagent_core.testing.conformance.threads import in_threads

checks = Checks(0)

SIZES = (1, 7, 64, 4097, 1 << 20)
FAR_TOO_MUCH = 1 << 50
"""Bytes, a pebibyte: more than any device has."""


def cases(target: Target) -> Iterator[Case]:
    """Yield the level's cases."""
    yield from checks.cases(target)
    yield from recording.checks.cases(target)


# -- what the device tells of itself


@checks.add("device")
def its_info_is_sane(device: str) -> None:
    with opened(device) as opening:
        info = opening.device.info
    assert info.reason is None, f"a device that was opened has the reason {info.reason!r} for not being available"
    assert isinstance(info.name, str), f"its name is {info.name!r}, expected text"
    assert info.name.strip(), "its name is empty"
    assert info.device.type == Device.parse(device).type, f"it calls itself {info.device}"
    assert info.memory_nbytes >= 0, f"memory_nbytes is {info.memory_nbytes}, expected the bytes, or 0 for unknown"
    for limit in ("max_threads_per_block", "max_parameters"):
        assert getattr(info, limit) > 0, f"{limit} is {getattr(info, limit)}, expected at least 1"
    for amount in ("shared_nbytes", "max_registers"):
        assert getattr(info, amount) >= 0, f"{amount} is {getattr(info, amount)}, expected 0 or more"
    assert len(info.max_grid) == 3, f"max_grid is {info.max_grid}, expected three numbers"
    assert min(info.max_grid) > 0, f"max_grid is {info.max_grid}, expected at least 1 block in each direction"
    for pair in info.details:
        assert len(pair) == 2, f"details have {pair!r}, expected pairs of a name and a text"
        assert all(isinstance(text, str) for text in pair), f"details have {pair!r}, expected texts"


@checks.add("device")
def its_probe_tells_the_same_each_time(device: str) -> None:
    listed: list[list[DeviceInfo]] = []
    for _ in range(2):
        with opened(device) as opening:
            infos = opening.session.plugins.devices()
            own = [info for info in infos if info.device == opening.device.device]
            assert len(own) == 1, f"{opening.device.device} is listed {len(own)} times, expected once"
            assert own[0] == opening.device.info, f"it is listed as {own[0]}, and opened as {opening.device.info}"
            listed.append(own)
    assert listed[0] == listed[1], f"listing it again gave {listed[1]} after {listed[0]}"


@checks.add("device")
def its_optional_parts_are_what_they_say(device: str) -> str:
    with opened(device) as opening:
        runtime = opening.runtime
        assert isinstance(runtime.host_memory, bool), f"host_memory is {runtime.host_memory!r}, expected True or False"
        assert isinstance(runtime.streams, int), f"streams is {runtime.streams!r}, expected a number"
        assert runtime.streams >= 1, f"streams is {runtime.streams}, expected at least 1"
        if runtime.streams > 1:
            with opening.lock:
                event = runtime.record_event(0)
                runtime.wait_event(1, event)
                runtime.synchronize()
        return f"{runtime.streams} streams, {'host' if runtime.host_memory else 'device'} memory"


@checks.add("device", nbytes=(64, 4099))
def host_memory_in_place(device: str, nbytes: int) -> str:
    """Where the runtime imports host memory: both sides see what the other writes, and freeing it leaves it alone."""
    with opened(device) as opening:
        runtime = opening.runtime
        if not runtime.imports_host:
            return "not offered"
        host = torch.zeros(nbytes + 4096, dtype=torch.uint8)
        address = -(-host.data_ptr() // 4096) * 4096
        memory = host[address - host.data_ptr() :][:nbytes]
        with opening.lock:
            buffer = runtime.import_host(address, nbytes)
        if buffer is None:
            return "declined"
        memory.copy_(torch.frombuffer(bytearray(noise(nbytes)), dtype=torch.uint8))
        assert_bytes(opening.read(buffer, 0, nbytes), noise(nbytes), "what the host wrote into memory that is imported")
        opening.write(buffer, 3, b"\x01\x02\x03")
        with opening.lock:
            runtime.synchronize()
        assert bytes(memory[3:6].tolist()) == b"\x01\x02\x03", "the host does not see what was written in place"
        with opening.lock:
            runtime.free(buffer)
        expected = noise(nbytes)[:3] + b"\x01\x02\x03" + noise(nbytes)[6:]
        assert_bytes(bytes(memory.tolist()), expected, "host memory after the buffer on it was freed")
        return "in place"


# -- memory


@checks.add("memory", nbytes=(0, *SIZES), full={"nbytes": (64 << 20,)})
def bytes_come_back(device: str, nbytes: int) -> None:
    """Whole buffers, and the buffer has at least the bytes that were asked for."""
    with opened(device) as opening, opening.buffer(nbytes) as buffer:
        data = noise(nbytes)
        opening.write(buffer, 0, data)
        assert_bytes(opening.read(buffer, 0, nbytes), data, "what was copied in came back otherwise")


@checks.add("memory", full={"at": (1, 64), "nbytes": (1023,)}, at=(0, 3, 1000), nbytes=(0, 1, 5, 64))
def bytes_at_an_offset(device: str, at: int, nbytes: int) -> None:
    """In the middle of a buffer whose other bytes stay what they are."""
    with opened(device) as opening, opening.buffer(4096) as buffer:
        before, data = noise(4096, seed=1), noise(nbytes, seed=2)
        opening.write(buffer, 0, before)
        opening.write(buffer, at, data)
        expected = before[:at] + data + before[at + nbytes :]
        assert_bytes(opening.read(buffer, 0, 4096), expected, f"after copy_in of {nbytes} bytes at {at}")
        assert_bytes(opening.read(buffer, at, nbytes), data, f"copy_out of {nbytes} bytes at {at}")


@checks.add("memory")
def bytes_at_the_very_end(device: str) -> None:
    with opened(device) as opening, opening.buffer(1001) as buffer:
        opening.write(buffer, 0, noise(1001))
        opening.write(buffer, 1000, b"\x7f")
        opening.write(buffer, 1001, b"")
        assert_bytes(opening.read(buffer, 1000, 1), b"\x7f", "the last byte")
        assert_bytes(opening.read(buffer, 1001, 0), b"", "no bytes at the end")


@checks.add("memory")
def copy_out_writes_what_it_is_given_and_no_more(device: str) -> None:
    with opened(device) as opening, opening.buffer(256) as buffer:
        data = noise(256)
        opening.write(buffer, 0, data)
        host = bytearray(b"\x11" * 300)
        with opening.lock:
            opening.runtime.copy_out(buffer, 100, memoryview(host)[50:90])
        assert_bytes(host, b"\x11" * 50 + data[100:140] + b"\x11" * 210, "host memory around what copy_out was given")
        assert_bytes(opening.read(buffer, 0, 256), data, "the buffer after copy_out")


@checks.add("memory", nbytes=(13, 8 << 20))
def host_bytes_may_be_reused_as_soon_as_copy_in_returns(device: str, nbytes: int) -> None:
    """Several copies in a row from the same host memory, written over at once."""
    with opened(device) as opening, contextlib.ExitStack() as stack:
        buffers = [stack.enter_context(opening.buffer(nbytes)) for _ in range(4)]
        host = bytearray(nbytes)
        for seed, buffer in enumerate(buffers):
            host[:] = noise(nbytes, seed)
            with opening.lock:
                opening.runtime.copy_in(buffer, 0, memoryview(host))
            host[:] = bytes(nbytes)
        for seed, buffer in enumerate(buffers):
            told = "host memory was read after copy_in had returned"
            assert_bytes(opening.read(buffer, 0, nbytes), noise(nbytes, seed), told)


@checks.add("memory")
def live_buffers_do_not_overlap(device: str) -> None:
    """Many of all sizes, freed and allocated in turns."""
    with opened(device) as opening:
        live = allocate_all(opening, [(*SIZES, 65, 4096)[i % 7] for i in range(42)], first_seed=0)
        assert_untouched(opening, live)
        for buffer, _ in live[::2]:
            with opening.lock:
                opening.runtime.free(buffer)
        live = live[1::2]
        assert_untouched(opening, live)
        live += allocate_all(opening, [(*SIZES, 65, 4096)[i % 7] for i in range(63)], first_seed=100)
        assert_untouched(opening, live)
        for buffer, _ in live:
            with opening.lock:
                opening.runtime.free(buffer)


@checks.add("memory")
def buffers_are_freed_in_any_order(device: str) -> None:
    with opened(device) as opening:
        for order in (slice(None), slice(None, None, -1)):
            live = allocate_all(opening, [100] * 5, first_seed=3)
            for buffer, _ in live[order]:
                with opening.lock:
                    opening.runtime.free(buffer)
        with opening.buffer(100) as buffer:
            opening.write(buffer, 0, noise(100))
            assert_bytes(opening.read(buffer, 0, 100), noise(100), "a buffer after others were freed")


@checks.add("memory")
def too_much_memory_is_refused(device: str) -> str:
    """With an error that says something, and the device works afterwards."""
    with opened(device) as opening, opening.buffer(1000) as held:
        opening.write(held, 0, noise(1000))
        for _ in range(3):
            try:
                with opening.lock:
                    given = opening.runtime.allocate(FAR_TOO_MUCH)
            except Exception as error:  # noqa: BLE001  whatever it raises is looked at
                told = f"{type(error).__name__}: {error}"
                refused = isinstance(error, MemoryError) or bool(str(error).strip())
                assert refused, f"allocate of {FAR_TOO_MUCH} bytes raised {type(error).__name__} without a message"
            else:
                raise AssertionError(f"allocate of {FAR_TOO_MUCH} bytes gave {given!r}, expected a MemoryError")
        assert_bytes(opening.read(held, 0, 1000), noise(1000), "a live buffer after memory was refused")
        assert_program_runs(device)
        return told


# -- kernels


@checks.add("kernels")
def synchronize_with_nothing_to_wait_for(device: str) -> None:
    with opened(device) as opening, opening.lock:
        for _ in range(3):
            opening.runtime.synchronize()


@checks.add("kernels", what=("neither source nor function", "source that does not compile"))
def a_kernel_that_is_none_is_refused(device: str, what: str) -> str:
    """When it is loaded, or at the latest when it was launched; and the device works afterwards."""
    source = "this is no kernel in any language {" if "compile" in what else None
    kernel = KernelDescriptor("aten::relu", "no_such_kernel", source=source)
    with opened(device) as opening:
        try:
            with opening.lock:
                loaded = opening.runtime.load(kernel)
                opening.runtime.launch(loaded, LaunchConfig(), [])
                opening.runtime.synchronize()
        except Exception as error:  # noqa: BLE001  whatever it raises is looked at
            told = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            raise AssertionError(f"a kernel with {what} was loaded and launched, and nothing was raised")
        assert_program_runs(device)
    return told


@checks.add("kernels", launches=(64,), full={"launches": (1000,)})
def launches_run_in_order(device: str, launches: int) -> str:
    """Each reads what the one before has written, and has a number of its own."""
    for name, step in CHAINS.items():

        def chain(x: torch.Tensor, step: Callable[..., Any] = step) -> torch.Tensor:
            for position in range(launches):
                x = step(x, position)
            return x

        with opened(device, fusion=False, generated_kernels="all") as opening:
            x = torch.arange(-8.0, 8.0).reshape(4, 4)
            compiled = opening.compile(lambda value: (chain(value),), x)
            for _ in range(3):
                [got] = compiled([x])
                assert_same(got, chain(x), f"{launches} launches of {name}")
            if not opening.fallbacks:
                return f"{launches} launches of {name}"
    raise CannotRunError(f"the device has a kernel for none of {', '.join(CHAINS)}")


@checks.add("kernels")
def a_program_runs_again_and_again(device: str) -> Ran:
    with opened(device) as opening:
        assert_program_runs(device)
        return opening.ran()


# -- errors


@checks.add("errors")
def an_index_out_of_range_names_operator_and_line(device: str) -> Ran:
    """As eager PyTorch, with what failed and where it comes from; the next call is right."""

    def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index] * 2.0

    x, good, bad = torch.randn(5, 3), torch.tensor([4, 0, -5]), torch.tensor([1, 99, 2])
    with opened(device) as opening:
        compiled = torch.compile(pick, backend="kagent", options={"device": device}, dynamic=False)
        assert_same(compiled(x, good), pick(x, good), "before the error")
        try:
            given = compiled(x, bad)
        except KernelExecutionError as error:
            told = str(error)
            assert isinstance(error, IndexError), f"{type(error).__name__} is no IndexError, as eager's is: {told}"
            assert "aten::index" in told, f"the error does not name the operator: {told}"
            assert "from:" in told, f"the error does not name the user's line: {told}"
        else:
            raise AssertionError(f"an index out of range raised nothing and gave {given}")
        assert_same(compiled(x, good), pick(x, good), "after the error")
        return opening.ran()


@checks.add("errors")
def shapes_that_do_not_fit_are_refused(device: str) -> None:
    import kagent_core

    with opened(device):
        try:
            given = kagent_core.run_op("aten::mm", torch.randn(2, 3), torch.randn(4, 2), device=device)
        except KagentError as error:
            assert "aten::mm" in str(error), f"the error does not name the operator: {error}"
        else:
            raise AssertionError(f"a product of 2 × 3 and 4 × 2 gave {tuple(given.shape)}")
        assert_program_runs(device)


# -- threads, closing


@checks.add("threads", threads=(4,), calls=(25,), full={"calls": (500,)})
def several_threads_run_programs_at_once(device: str, threads: int, calls: int) -> Ran:
    """One program, each thread with inputs of its own."""
    inputs = [[torch.randn(6, 6) for _ in range(3)] for _ in range(threads)]
    with opened(device) as opening:
        compiled = opening.compile(program, *inputs[0])
        want = [program(*given) for given in inputs]

        def work(number: int) -> None:
            for _ in range(calls):
                assert_same(tuple(compiled(inputs[number])), want[number], f"thread {number}")

        in_threads(work, threads)
        return opening.ran()


@checks.add("closing")
def closed_and_opened_again(device: str) -> None:
    for _ in range(3):
        with opened(device) as opening:
            with opening.buffer(100) as buffer:
                opening.write(buffer, 0, noise(100))
                assert_bytes(opening.read(buffer, 0, 100), noise(100), "after it was opened again")
            assert_program_runs(device)


@checks.add("closing")
def two_sessions_at_once(device: str) -> None:
    """As two models with different options have: closing one leaves the other alone."""
    x = [torch.randn(6, 6) for _ in range(3)]
    with opened(device) as outer:
        first = outer.compile(program, *x)
        with opened(device, fusion=False) as inner:
            second = inner.compile(program, *x)
            assert_same(tuple(second(x)), program(*x), "in the second session")
            assert_same(tuple(first(x)), program(*x), "in the first session")
            del second
        assert_same(tuple(first(x)), program(*x), "in the first session, after the second was closed")


# -- helpers


CHAINS: dict[str, Callable[..., Any]] = {
    "aten::add": lambda x, position: x + (position % 7 + 1),
    "aten::mul": lambda x, position: x * (2.0 if position % 3 else 0.25),
    "aten::sub": lambda x, position: (position % 5) - x,
    "aten::mm": lambda x, position: x @ torch.eye(4).roll(1, 0),
}
"""Operators that a device may have, as one step of a long chain: exact, and no step or two of it change nothing."""


def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute a bit of what most devices have kernels for."""
    hidden = torch.relu(x @ w)
    return hidden + y, (hidden * 2.0).sum(-1)


def assert_program_runs(device: str) -> None:
    """Compile a small program in the session that is open, and run it twice."""
    compiled = torch.compile(program, backend="kagent", options={"device": device}, dynamic=False)
    for seed in range(2):
        torch.manual_seed(seed)
        given = [torch.randn(6, 6) for _ in range(3)]
        assert_same(compiled(*given), program(*given), "a small program")


def allocate_all(opening: Opened, sizes: list[int], first_seed: int) -> list[tuple[Any, bytes]]:
    """Allocate buffers and fill each with bytes of its own."""
    live = []
    for seed, nbytes in enumerate(sizes, first_seed):
        with opening.lock:
            buffer = opening.runtime.allocate(nbytes)
        assert buffer is not None, f"allocate({nbytes}) returned None, expected a buffer or a MemoryError"
        live.append((buffer, noise(nbytes, seed)))
        opening.write(buffer, 0, live[-1][1])
    gc.collect()  # a buffer lives until it is freed, whatever the collector does
    return live


def assert_untouched(opening: Opened, live: list[tuple[Any, bytes]]) -> None:
    """Assert that every buffer has its bytes."""
    for position, (buffer, data) in enumerate(live):
        got = opening.read(buffer, 0, len(data))
        assert_bytes(got, data, f"live buffer {position} of {len(live)}, of {len(data)} bytes, was written over")
