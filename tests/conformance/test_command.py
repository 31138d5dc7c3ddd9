"""``kagent conformance``, and the kit as pytest tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kagent_core
from kagent_core.cli import app
from kagent_core.testing.fake import FakeDevice

from . import planted

FEW = ("--only", "0/its*")


def kagent(*arguments: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["conformance", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_the_table():
    code, told, errors = kagent("fake", "--level", "0", *FEW)
    assert (code, errors) == (0, "")
    assert re.search(r"^level +cases +passed +native +fallback +failed$", told, re.MULTILINE)
    assert re.search(r"^0 contract +3 +3 +3 +- +-$", told, re.MULTILINE)
    assert told.endswith("fake:0: 3 cases of a part, 0 wrong\n")


def test_a_failure_ends_with_1_and_a_script(tmp_path):
    with kagent_core.use_plugin(FakeDevice(runtime=planted.CopyOutIgnoresOffset())):
        code, told, _ = kagent("fake:0", "--only", "0/bytes at an offset: at=3*", "--scripts", tmp_path, "--level", "0")
    assert code == 1
    assert "failed: 0/bytes at an offset: at=3, nbytes=64" in told
    assert "of 4096 bytes" not in told
    assert told.count("a script that reproduces it:") == 2, "only those of the first failures"
    assert "def bytes_at_an_offset(device: str, at: int, nbytes: int) -> None:" in told
    assert (tmp_path / "0-bytes-at-an-offset-at-3-nbytes-64.py").is_file()
    assert f"scripts in {tmp_path}" in " ".join(told.split())


def test_verbose_prints_every_script():
    with kagent_core.use_plugin(FakeDevice(runtime=planted.CopyOutIgnoresOffset())):
        _, told, _ = kagent("fake:0", "--only", "0/bytes at an offset: at=3*", "--verbose", "--level", "0")
    assert told.count("a script that reproduces it:") == told.count("failed: 0/") > 2


def test_json_on_stdout_and_the_table_on_stderr():
    code, told, errors = kagent("fake", "--level", "0", *FEW, "--json", "-")
    assert code == 0
    assert json.loads(told)["badge"] == "3 cases of a part, 0 wrong"
    assert "0 contract" in errors


def test_files(tmp_path):
    page, data = tmp_path / "out" / "page.html", tmp_path / "report.json"
    code, told, _ = kagent("fake", "--level", "0", *FEW, "--json", data, "--html", page)
    assert code == 0
    assert json.loads(data.read_text())["device"] == "fake:0"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "report.json" in told


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, errors = kagent("fake", "--level", "0", *FEW, "--html", tmp_path / "file" / "page.html")
    assert code == 1
    assert "error: cannot write the report" in errors


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nonesuch",), "no installed plugin brings the device type 'nonesuch'"),
        (("fake", "--level", "9"), "there is no level 9 of conformance"),
        (("fake", "--level", "0", "--only", "1/*"), "no case fits the pattern '1/*'"),
    ],
)
def test_mistakes(arguments, told):
    code, _, errors = kagent(*arguments)
    assert code == 1
    assert told in errors


def test_nothing_is_left_in_the_environment():
    before = dict(os.environ)
    kagent("fake", "--level", "0", *FEW)
    assert dict(os.environ) == before


# -- pytest


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rA",
        "--color=no",
        "-W",
        "error::pytest.PytestWarning",
    ]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=250)
    return done.returncode, done.stdout + done.stderr


KIT = ("--pyargs", "kagent_core.testing.conformance")


def test_without_a_device_pytest_says_what_to_pass(tmp_path):
    code, told = run_pytest(tmp_path, *KIT)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "pass --kagent-device DEVICE" in told


def test_each_case_is_a_test(tmp_path):
    code, told = run_pytest(tmp_path, *KIT, "--kagent-device", "fake", "--kagent-level", "0", "--kagent-only", "0/its*")
    assert code == 0, told
    assert re.search(r"^PASSED .*0/its info is sane$", told, re.MULTILINE)
    assert re.search(r"\b3 passed in", told)


def test_expected_failures_are_xfails_and_what_could_not_run_is_skipped(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN + LISTED, encoding="utf-8")
    outcomes = []
    for level, only in (("0", "0/bytes at an offset: at=3, nbytes=64"), ("5", "5/a fault of: wait_event")):
        broken = ("-p", "broken") if level == "0" else ()
        few = ("--kagent-device", "fake", "--kagent-level", level, "--kagent-only", only)
        code, told = run_pytest(tmp_path, *KIT, *broken, *few)
        assert code == 0, told
        outcomes.append(told)
    told = "\n".join(outcomes)
    assert re.search(r"^XFAIL .*0/bytes at an offset: at=3, nbytes=64 - offsets", told, re.MULTILINE)
    assert re.search(r"^SKIPPED .*the core never calls wait_event", told, re.MULTILINE)


LISTED = """
from kagent_core.testing.conformance import ExpectedFailure, ExpectedFailures, runner

runner.expected_of = lambda device: ExpectedFailures((ExpectedFailure("0/bytes at an offset*", "offsets"),))
"""

BROKEN = """
import pytest

import kagent_core
from kagent_core.testing.fake import FakeDevice, FakeRuntime


class Broken(FakeRuntime):
    def copy_out(self, buffer, byte_offset, data):
        super().copy_out(buffer, 0, data)


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session):
    using = kagent_core.use_plugin(FakeDevice(runtime=Broken()))
    using.__enter__()
    session.config.add_cleanup(lambda: using.__exit__(None, None, None))
    return (yield)
"""


def test_a_failure_shows_what_differs_and_the_script(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    options = ("-p", "broken", "--kagent-device", "fake", "--kagent-level", "0", "--kagent-only", "*at=3, nbytes=64")
    code, told = run_pytest(tmp_path, *KIT, *options)
    assert code == 1, told
    assert "case 0/bytes at an offset: at=3, nbytes=64 on fake:0: copy_out of 64 bytes at 3" in told
    assert "def bytes_at_an_offset(device: str" in told


def test_an_expected_failure_that_passes_fails(tmp_path):
    """`xfail` is strict, whatever the user's own settings say."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nxfail_strict = false\n", encoding="utf-8")
    (tmp_path / "listed.py").write_text(
        "from kagent_core.testing.conformance import ExpectedFailure, ExpectedFailures, runner\n"
        "runner.expected_of = lambda device: ExpectedFailures((ExpectedFailure('0/its info*', 'once'),))\n",
        encoding="utf-8",
    )
    options = ("-p", "listed", "--kagent-device", "fake", "--kagent-level", "0", "--kagent-only", "0/its info*")
    code, told = run_pytest(tmp_path, *KIT, *options)
    assert code == 1, told
    assert "[XPASS(strict)] once" in told


def test_other_runs_of_pytest_are_left_alone(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n", encoding="utf-8")
    code, told = run_pytest(tmp_path)
    assert code == 0
    assert "1 passed" in told
