"""The kit on the devices that come with the repository, at its quick size."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter

import pytest

from kagent_core.errors import ConfigError, DeviceError
from kagent_core.testing.conformance import LEVELS, Outcome, Target, run_conformance
from kagent_core.testing.conformance.opened import registered
from kagent_core.testing.conformance.runner import LEVEL_MODULES, cases_of

LONG = (("fake", 1), ("fake", 5))
"""A minute each. What is best in the first, random programs across a device and the fallback, has its own test; the
second is tried on the CPU, and in part on OpenCL and the emulated CUDA device."""

CASES = {
    # device, level: cases that could not run
    ("cpu", 0): set(),
    ("fake", 0): set(),
    ("cpu", 1): {"1/nothing is written behind a buffer"},
    ("fake", 1): set(),
    ("cpu", 5): {f"5/a fault of: {method}" for method in
                 ("allocate", "copy_in", "copy_out", "load", "launch", "synchronize", "launch_on", "record_event",
                  "wait_event", "prepare", "prepare_on", "import_host", "a prepared launch")},
    ("fake", 5): {f"5/a fault of: {method}" for method in
                  ("record_event", "wait_event", "prepare_on", "import_host", "a prepared launch")},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("device", "level"),
    [pytest.param(*case, marks=pytest.mark.nightly if case in LONG else ()) for case in CASES],
)
def test_nothing_fails_but_what_is_listed(device: str, level: int) -> None:
    report = run_conformance(device, [level])
    assert report.passed, "\n".join(f"{finding.case.key}: {finding.detail}" for finding in report.failures)
    could_not = {finding.case.key for finding in report.findings if finding.outcome is Outcome.COULD_NOT_RUN}
    assert could_not == CASES[device, level]
    assert report.counts(level).native > 0


def test_keys_are_unique_and_begin_with_the_level() -> None:
    with registered("fake:0"):
        for full in (False, True):
            target = Target("fake:0", full)
            for level in (0, 1, 5):
                cases = list(cases_of(target, [level]))
                assert [key for key, count in Counter(case.key for case in cases).items() if count > 1] == []
                assert all(case.key.startswith(f"{level}/") and case.family for case in cases)


def test_the_full_size_has_every_case_of_the_quick_one_and_more() -> None:
    for level in (0, 1):
        quick = {case.key for case in cases_of(Target("fake:0"), [level])}
        assert quick < {case.key for case in cases_of(Target("fake:0", full=True), [level])}


def test_there_is_a_module_for_every_level() -> None:
    assert len(LEVEL_MODULES) == len(LEVELS)


@pytest.mark.parametrize("level", [0, 1, 5])
def test_every_script_is_whole(level: int) -> None:
    """It reads as Python, and every name in it is defined in it or a builtin."""
    import builtins

    for case in cases_of(Target("fake:0"), [level]):
        script = case.script(Target("fake:0"))
        tree = ast.parse(script)
        known = {*vars(builtins), "__file__"}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                known |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                known.add(node.name)
            elif isinstance(node, ast.arg):
                known.add(node.arg)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                known.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known.add(node.id)
        annotations = {
            id(name)
            for node in ast.walk(tree)
            for note in (getattr(node, "annotation", None), getattr(node, "returns", None))
            if note is not None
            for name in ast.walk(note)
        }
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in annotations}
        assert used <= known, f"{case.key} lacks {used - known}"


BROKEN = """
from kagent_core.testing.fake import FakeRuntime

copy_out = FakeRuntime.copy_out
FakeRuntime.copy_out = lambda runtime, buffer, byte_offset, data: copy_out(runtime, buffer, 0, data)
"""


@pytest.mark.parametrize(
    ("device", "key", "ends"),
    [
        ("fake:0", "0/bytes at an offset: at=3, nbytes=5", 0),
        ("fake:0", "0/launches run in order: launches=64", 0),
        ("fake:0", "1/a tensor: transposed, everything, float32", 0),
        ("fake:0", "5/a fault of: allocate", 0),
        ("cpu", "1/numbers that are arguments of the program", 0),
        ("fake:0", "0/bytes at an offset: at=3, nbytes=64", 1),
    ],
)
def test_a_script_does_what_its_case_does(device: str, key: str, ends: int, tmp_path) -> None:
    [case] = [case for case in cases_of(Target(device), [int(key[0])]) if case.key == key]
    path = tmp_path / "script.py"
    text, future = case.script(Target(device)), "from __future__ import annotations\n"
    assert future in text
    path.write_text(text.replace(future, future + BROKEN) if ends else text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == ends, done.stderr
    if ends:
        assert "copy_out of 64 bytes at 3" in done.stderr


def test_levels_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="there is no level 7 of conformance"):
        run_conformance("fake", [7])


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(DeviceError, match="no installed plugin brings the device type 'toyy'"):
        run_conformance("toyy", [0])


def test_a_pattern_that_fits_nothing() -> None:
    with pytest.raises(ConfigError, match=r"no case fits the pattern '0/no such\*'"):
        run_conformance("fake", [0], only="0/no such*")


def test_another_fake_device_than_the_first() -> None:
    report = run_conformance("fake:1", [0], only="0/its info is sane")
    assert str(report.info.device) == "fake:1"
    assert report.passed
