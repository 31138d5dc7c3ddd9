"""The ProfilerAgent: what it answers, and that its file survives threads, processes and accidents."""

import gc
import logging
import math
import os
import sqlite3
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kagent_core.profile import store
from kagent_core.profile.agent import ProfilerAgent
from kagent_core.profile.problem import problem_key
from kagent_core.specs import (
    Device,
    DeviceInfo,
    DType,
    KernelDescriptor,
    KernelTask,
    LaunchConfig,
    OpCall,
    TaskFinished,
    TensorSpec,
)

F32 = DType("float32", 4)
TOY = DeviceInfo(Device("toy", 0), "Toy 3000", details=(("driver", "1.2"),))
OTHERS = [
    DeviceInfo(Device("toy", 1), "Toy 3000", details=(("driver", "1.2"),)),
    DeviceInfo(Device("toy", 0), "Toy 4000", details=(("driver", "1.2"),)),
    DeviceInfo(Device("toy", 0), "Toy 3000", details=(("driver", "1.3"),)),
    DeviceInfo(Device("toy", 0), "Toy 3000"),
]
SMALL, WIDE = LaunchConfig(block=(64, 1, 1)), LaunchConfig((2, 3, 4), (256, 1, 1), 96)


def spec(*shape, strides=None, dtype=F32):
    contiguous = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorSpec(dtype, shape, strides or contiguous, 0, 0)


def call_of(*inputs, signature="aten::relu", output=None):
    inputs = inputs or (spec(8),)
    output = output or inputs[0]
    return OpCall(0, "call", signature, dict(enumerate(inputs)), inputs, (output,), (output,))


def finished(elapsed_ms, *calls, kernel="plain", error=None):
    calls = calls or (call_of(),)
    descriptor = KernelDescriptor(calls[0].signature if calls else "", kernel)
    task = KernelTask(0, descriptor, (), (), (), LaunchConfig(), TOY.device, 0, (), calls)
    return TaskFinished(task, elapsed_ms, error)


def counts(path):
    return {entry.kernel: entry.count for entry in ProfilerAgent(path).entries()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "profile.sqlite3"


@pytest.fixture(params=["file", "memory"])
def agent(request, path):
    return ProfilerAgent(path if request.param == "file" else None)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- problems


def test_a_problem_is_readable():
    addmm = call_of(spec(4, strides=(2,)), spec(8, 16), spec(16, 4), signature="aten::addmm", output=spec(8, 4))
    assert problem_key([addmm]) == "aten::addmm(f32[4], f32[8,16]:c, f32[16,4]:c) -> f32[8,4]:c"
    assert problem_key([call_of(spec()), addmm]).startswith("aten::relu(f32[]:c) -> f32[]:c; aten::addmm(")


def test_problems_differ_by_what_makes_a_kernel_faster_or_slower():
    calls = [
        call_of(spec(8, 8)),
        call_of(spec(8, 8, strides=(1, 8))),
        call_of(spec(8, 8, dtype=DType("float64", 8))),
        call_of(spec(64)),
        call_of(spec(8, 8), signature="aten::neg"),
        call_of(spec(8, 8), output=spec(4, 4)),
    ]
    assert len({problem_key([call]) for call in calls}) == len(calls)
    assert problem_key(calls[:2]) != problem_key(calls[1::-1])


def test_problems_do_not_differ_by_scalars():
    one = OpCall(0, "a", "aten::add.Scalar", {"self": spec(2), "other": 1}, (spec(2),), (spec(2),), (spec(2),))
    two = OpCall(5, "b", "aten::add.Scalar", {"self": spec(2), "other": 2}, (spec(2),), (spec(2),), (spec(2),))
    assert problem_key([one]) == problem_key([two])


def test_a_long_problem_is_cut_but_stays_itself():
    calls = [call_of(spec(8, 8))] * 30
    key = problem_key(calls)
    assert len(key) == 200
    assert key.startswith("aten::relu(f32[8,8]:c)")
    assert key == problem_key(list(calls))
    assert key != problem_key([*calls[:-1], call_of(spec(8, 9))])


# -- answers


def test_the_shortest_time_is_told_and_count_and_mean_are_kept(agent):
    assert agent.time_ms(TOY, call_of()) is None
    for elapsed_ms in (3.0, 1.0, 2.0):
        agent.record(TOY, finished(elapsed_ms))
    assert agent.time_ms(TOY, call_of()) == 1.0
    [entry] = agent.entries()
    assert (entry.count, entry.mean_ms, entry.min_ms) == (3, 2.0, 1.0)
    assert (entry.device, entry.name, entry.driver) == ("toy:0", "Toy 3000", "1.2")
    assert (entry.kernel, entry.signature) == ("plain", "aten::relu")
    assert entry.problem == problem_key([call_of()])


def test_a_time_holds_for_its_size_operator_and_device_only(agent):
    agent.record(TOY, finished(1.0))
    assert agent.time_ms(TOY, call_of(spec(9))) is None
    assert agent.time_ms(TOY, call_of(signature="aten::neg")) is None
    for other in OTHERS:
        assert agent.time_ms(other, call_of()) is None
    assert agent.time_ms(TOY, call_of()) == 1.0


def test_the_fastest_kernel_counts(agent):
    agent.record(TOY, finished(2.0, kernel="slow"))
    agent.record(TOY, finished(0.5, kernel="fast"))
    agent.record(TOY, finished(1.5, kernel="slow"))
    assert agent.time_ms(TOY, call_of()) == 0.5
    assert [(e.kernel, e.min_ms) for e in agent.entries()] == [("fast", 0.5), ("slow", 1.5)]


def test_a_fused_task_says_nothing_about_its_operators_alone(agent):
    agent.record(TOY, finished(1.0, call_of(), call_of(signature="aten::neg")))
    assert agent.time_ms(TOY, call_of()) is None
    assert [entry.signature for entry in agent.entries()] == ["aten::relu+aten::neg"]


@pytest.mark.parametrize("elapsed_ms", [float("nan"), float("inf"), -1.0])
def test_what_is_no_time_is_left_out(agent, elapsed_ms):
    agent.record(TOY, finished(elapsed_ms))
    agent.record_config(TOY, "plain", "p", SMALL, elapsed_ms)
    assert agent.entries() == agent.config_entries() == []


def test_a_failed_task_and_a_task_without_operators_are_left_out(agent):
    agent.record(TOY, finished(1.0, error=RuntimeError("boom")))
    copy = finished(1.0)
    task = KernelTask(0, copy.task.kernel, (), (), (), None, TOY.device, 0, (), ())
    agent.record(TOY, TaskFinished(task, 1.0))
    assert agent.entries() == []


def test_the_fastest_launch_config_is_suggested(agent):
    assert agent.suggest(TOY, "plain", "p") is None
    agent.record_config(TOY, "plain", "p", SMALL, 2.0)
    agent.record_config(TOY, "plain", "p", WIDE, 1.0)
    agent.record_config(TOY, "plain", "p", SMALL, 1.5)
    assert agent.suggest(TOY, "plain", "p") == WIDE
    assert agent.suggest(TOY, "plain", "q") is None
    assert agent.suggest(TOY, "other", "p") is None
    for other in OTHERS:
        assert agent.suggest(other, "plain", "p") is None
    [entry] = agent.config_entries()
    assert (entry.kernel, entry.problem, entry.config, entry.elapsed_ms) == ("plain", "p", WIDE, 1.0)


def test_clear_forgets_everything(agent, path):
    agent.record(TOY, finished(1.0))
    agent.record_config(TOY, "plain", "p", SMALL, 2.0)
    agent.flush()
    agent.record(TOY, finished(1.0, kernel="later"))
    assert agent.time_ms(TOY, call_of()) == 1.0
    agent.clear()
    assert agent.time_ms(TOY, call_of()) is None
    assert agent.suggest(TOY, "plain", "p") is None
    assert agent.entries() == agent.config_entries() == []
    assert counts(path) == {}


# -- the file


def test_the_next_process_knows_what_this_one_measured(path):
    first = ProfilerAgent(path)
    first.record(TOY, finished(2.0))
    first.record_config(TOY, "plain", "p", WIDE, 2.0)
    first.close()
    second = ProfilerAgent(path)
    assert second.time_ms(TOY, call_of()) == 2.0
    assert second.suggest(TOY, "plain", "p") == WIDE
    second.record(TOY, finished(1.0))
    second.record_config(TOY, "plain", "p", SMALL, 3.0)
    assert second.time_ms(TOY, call_of()) == 1.0
    assert second.suggest(TOY, "plain", "p") == WIDE
    second.flush()
    third = ProfilerAgent(path)
    [entry] = third.entries()
    assert (entry.count, entry.mean_ms, entry.min_ms) == (2, 1.5, 1.0)
    assert third.suggest(TOY, "plain", "p") == WIDE


def test_what_is_buffered_counts_when_a_device_is_first_asked_about(path):
    ProfilerAgent(path).record(TOY, finished(5.0))
    gc.collect()
    agent = ProfilerAgent(path)
    agent.record(TOY, finished(2.0))
    assert agent.time_ms(TOY, call_of()) == 2.0
    agent.flush()
    assert agent.time_ms(TOY, call_of()) == 2.0


def test_nothing_is_written_before_there_is_something_to_write(path):
    agent = ProfilerAgent(path)
    assert agent.time_ms(TOY, call_of()) is None
    assert agent.entries() == []
    agent.clear()
    agent.close()
    assert not path.parent.exists()


def test_directory_and_file_are_for_this_user_only(path):
    agent = ProfilerAgent(path)
    agent.record(TOY, finished(1.0))
    agent.close()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_buffer_is_written_after_so_many_records(path):
    agent = ProfilerAgent(path, flush_every=3)
    for number in range(2):
        agent.record(TOY, finished(1.0, kernel=f"kernel{number}"))
    assert not path.exists()
    agent.record(TOY, finished(1.0, kernel="kernel0"))
    assert counts(path) == {"kernel0": 2, "kernel1": 1}
    agent.close()
    assert counts(path) == {"kernel0": 2, "kernel1": 1}, "nothing may be written twice"


def test_an_agent_that_is_dropped_writes_its_buffer(path):
    agent = ProfilerAgent(path)
    agent.record(TOY, finished(1.0))
    del agent
    gc.collect()
    assert counts(path) == {"plain": 1}


def test_after_close_an_agent_goes_on(path):
    agent = ProfilerAgent(path)
    agent.close()
    agent.record(TOY, finished(1.0))
    agent.close()
    assert counts(path) == {"plain": 1}


def test_a_memory_agent_touches_no_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    agent = ProfilerAgent(None, flush_every=1)
    agent.record(TOY, finished(1.0))
    agent.close()
    assert agent.time_ms(TOY, call_of()) == 1.0
    assert list(tmp_path.iterdir()) == []


# -- threads and processes


def test_many_threads_lose_nothing(path):
    agent = ProfilerAgent(path, flush_every=40)

    def work(thread):
        for number in range(50):
            agent.record(TOY, finished(1.0 + thread + number, kernel=f"kernel{number % 5}"))
            agent.record_config(TOY, "plain", "p", LaunchConfig((thread, 1, 1)), 10.0 - thread)
            agent.time_ms(TOY, call_of())
        return agent.suggest(TOY, "plain", "p")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    agent.close()
    assert counts(path) == {f"kernel{number}": 80 for number in range(5)}
    again = ProfilerAgent(path)
    assert again.time_ms(TOY, call_of()) == agent.time_ms(TOY, call_of()) == 1.0
    assert again.suggest(TOY, "plain", "p") == LaunchConfig((7, 1, 1))


PROGRAM = """
    import os, sys
    from pathlib import Path
    from kagent_core.profile.agent import ProfilerAgent
    from kagent_core.specs import *

    toy = DeviceInfo(Device("toy", 0), "Toy 3000", details=(("driver", "1.2"),))
    x = TensorSpec(DType("float32", 4), (8,), (1,), 0, 0)
    call = OpCall(0, "call", "aten::relu", {}, (x,), (x,), (x,))

    def finished(elapsed_ms, kernel):
        descriptor = KernelDescriptor("aten::relu", kernel)
        return TaskFinished(
            KernelTask(0, descriptor, (), (), (), LaunchConfig(), toy.device, 0, (), (call,)), elapsed_ms
        )
"""


def start(body, path, *arguments):
    source = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", source, str(path), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate("go\n", timeout=120)
    assert process.returncode == 0, err
    assert "WARNING" not in err
    return out


def test_two_processes_that_write_at_once_lose_nothing(path):
    body = """
        agent = ProfilerAgent(Path(sys.argv[1]), flush_every=10)
        sys.stdin.readline()  # so that they begin together
        mine = int(sys.argv[2])
        for number in range(100):
            agent.record(toy, finished(float(mine + number), "shared"))
            agent.record(toy, finished(1.0, f"own{mine}"))
            agent.record_config(toy, "shared", "p", LaunchConfig((mine, 1, 1)), float(mine))
        agent.close()
    """
    processes = [start(body, path, number) for number in ("2", "3")]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        finish(process)
    agent = ProfilerAgent(path)
    entries = {entry.kernel: entry for entry in agent.entries()}
    assert {name: entry.count for name, entry in entries.items()} == {"shared": 200, "own2": 100, "own3": 100}
    assert entries["shared"].min_ms == 2.0
    assert entries["shared"].mean_ms == pytest.approx(2.5 + 49.5)
    assert agent.suggest(TOY, "shared", "p") == LaunchConfig((2, 1, 1))


def test_the_buffer_is_written_at_exit_and_the_module_needs_no_torch(path):
    body = """
        agent = ProfilerAgent(Path(sys.argv[1]))
        agent.record(toy, finished(1.0, "plain"))
        print("torch" in sys.modules)
    """
    assert finish(start(body, path)).strip() == "False"
    assert counts(path) == {"plain": 1}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
def test_a_forked_child_does_not_write_its_parents_records(path):
    body = """
        import threading
        agent = ProfilerAgent(Path(sys.argv[1]))
        agent.record(toy, finished(1.0, "parent"))
        agent._buffer._io_lock.acquire()  # as another thread would while it writes
        child = os.fork()
        if child == 0:
            agent.record(toy, finished(1.0, "child"))
            agent.flush()
            os._exit(0)
        agent._buffer._io_lock.release()
        assert os.waitpid(child, 0)[1] == 0
        agent.close()
    """
    finish(start(body, path))
    assert counts(path) == {"parent": 1, "child": 1}


def test_a_file_that_is_in_use_is_written_later(path, monkeypatch, caplog):
    monkeypatch.setattr(store, "BUSY_TIMEOUT_S", 0.01)
    writer = ProfilerAgent(path)
    writer.record(TOY, finished(5.0))
    writer.close()
    agent = ProfilerAgent(path)
    agent.record(TOY, finished(7.0))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        agent.flush()
        assert agent.time_ms(TOY, call_of()) == 7.0, "the file cannot be read now, so the buffer answers"
    assert agent.time_ms(TOY, call_of()) == 5.0
    agent.close()
    assert counts(path) == {"plain": 2}
    assert warnings_of(caplog) == []


def test_records_that_are_lost_are_told(path, monkeypatch, caplog):
    monkeypatch.setattr(store, "BUSY_TIMEOUT_S", 0.01)
    agent = ProfilerAgent(path)
    agent.record(TOY, finished(5.0))
    agent.close()
    agent.record(TOY, finished(7.0))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        agent.close()
    assert warnings_of(caplog) == [f"1 timings and 0 launch configs were not written: '{path}' is in use by others"]


# -- accidents


def use(agent):
    """Record, ask and write, twice; the answers must be right with and without a file."""
    for elapsed_ms in (2.0, 1.0):
        agent.record(TOY, finished(elapsed_ms))
        agent.record_config(TOY, "plain", "p", WIDE, elapsed_ms)
        assert agent.time_ms(TOY, call_of()) == elapsed_ms
        assert agent.suggest(TOY, "plain", "p") == WIDE
        agent.flush()
    [entry] = agent.entries()
    assert (entry.count, entry.min_ms) == (2, 1.0)
    assert len(agent.config_entries()) == 1
    agent.close()


def damage_header(path):
    path.write_bytes(b"this is not a database, and was never one\n" * 100)


def damage_pages(path):
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))


def damage_length(path):
    path.write_bytes(b"oops")


@pytest.mark.parametrize("damage", [damage_header, damage_pages, damage_length])
def test_a_corrupt_file_is_renamed_aside_and_begun_anew(path, damage, caplog):
    before = ProfilerAgent(path)
    for number in range(200):
        before.record(TOY, finished(0.1, kernel=f"kernel{number}"))
    before.close()
    damage(path)
    damaged = path.read_bytes()
    leftover = path.with_name(path.name + "-shm")
    leftover.write_bytes(b"left by a crash")
    use(ProfilerAgent(path))
    aside = path.with_name("profile.sqlite3.corrupt-1")
    [warning] = warnings_of(caplog)
    assert f"'{path}'" in warning
    assert f"'{aside}'" in warning
    assert aside.read_bytes() == damaged
    assert not leftover.exists()
    assert aside.with_name(aside.name + "-shm").read_bytes() == b"left by a crash"
    assert counts(path) == {"plain": 2}


def test_a_second_corrupt_file_does_not_replace_the_first(path, caplog):
    path.parent.mkdir()
    for number in (1, 2):
        damage_header(path)
        agent = ProfilerAgent(path)
        agent.record(TOY, finished(1.0))
        agent.close()
        assert path.with_name(f"profile.sqlite3.corrupt-{number}").exists()
    assert len(warnings_of(caplog)) == 2


def test_a_file_that_becomes_corrupt_meanwhile_is_renamed_too(path, caplog):
    agent = ProfilerAgent(path)
    agent.record(TOY, finished(1.0))
    agent.flush()
    damage_header(path)
    agent.record(TOY, finished(1.0, kernel="later"))
    agent.flush()
    assert len(warnings_of(caplog)) == 1
    assert counts(path) == {"later": 1}


def other_version(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE timings (whatever TEXT)")
        db.execute(f"PRAGMA user_version = {store.SCHEMA_VERSION + 1}")


def other_program(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE recipes (dish TEXT)")


@pytest.mark.parametrize("make", [other_version, other_program])
def test_a_file_of_another_version_is_left_alone(path, make, caplog):
    path.parent.mkdir()
    make(path)
    before = path.read_bytes()
    use(ProfilerAgent(path))
    [warning] = warnings_of(caplog)
    assert "in memory only" in warning
    assert f"'{path}' has schema version" in warning
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def file_in_the_way(path):
    path.parent.write_text("a file where the directory should be")


def directory_in_the_way(path):
    path.mkdir(parents=True)


@pytest.mark.parametrize("obstruct", [file_in_the_way, directory_in_the_way])
def test_where_nothing_can_be_written_the_agent_works_in_memory(path, obstruct, caplog):
    obstruct(path)
    use(ProfilerAgent(path))
    [warning] = warnings_of(caplog)
    assert "in memory only" in warning
    assert str(path) in warning


def test_a_full_disk_costs_no_record(path, monkeypatch, caplog):
    def full(profile_file, profile):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store.ProfileFile, "write", full)
    agent = ProfilerAgent(path, flush_every=2)
    for _ in range(5):
        agent.record(TOY, finished(1.0))
    assert agent.entries()[0].count == 5
    assert warnings_of(caplog) == [f"timings are kept in memory only: '{path}': database or disk is full"]


def test_recording_goes_on_while_another_thread_writes(path, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    write = store.ProfileFile.write

    def slow(profile_file, profile):
        writing.set()
        assert go_on.wait(60)
        write(profile_file, profile)

    monkeypatch.setattr(store.ProfileFile, "write", slow)
    agent = ProfilerAgent(path)
    agent.time_ms(TOY, call_of())
    agent.record(TOY, finished(2.0))
    thread = threading.Thread(target=agent.flush)
    thread.start()
    assert writing.wait(60)
    agent.record(TOY, finished(1.0))  # would hang here if it waited for the disk
    assert agent.time_ms(TOY, call_of()) == 1.0
    go_on.set()
    thread.join()
    agent.close()
    assert counts(path) == {"plain": 2}
