"""The commands that list things: what they print, as tables and as JSON, and how errors look."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import importlib_metadata
import pytest
from typer.testing import CliRunner

import kagent_core
from kagent_core.cli import app
from kagent_core.config import Config
from kagent_core.errors import ConfigError
from kagent_core.hooks import hookimpl
from kagent_core.specs import Device, DeviceInfo

CPU = DeviceInfo(
    Device("cpu"),
    "Some Processor",
    memory_nbytes=3 * 2**29,
    max_threads_per_block=1,
    details=(("threads", "2"),),
)
ABSENT = DeviceInfo(Device("toy", 0), "Toy 3000", reason="no driver found; install toy-driver")
EMULATED = DeviceInfo(Device("toy", 1), "Toy 4000", emulated=True)


@dataclass
class Point:
    """An entry point of a distribution that is not there."""

    name: str
    load: Callable[[], Any]
    value: str = "some.module"
    dist: Any = None

    def __post_init__(self) -> None:
        self.dist = self.dist or SimpleNamespace(name=f"kagent-{self.name}", version="1.2")


def plugin_with(*infos: DeviceInfo) -> Any:
    class Plugin:
        @hookimpl
        def kagent_contract_version(self) -> int:
            return 1

        @hookimpl
        def kagent_devices(self, config: Config) -> Sequence[DeviceInfo]:
            return infos

    return Plugin()


def fail_to_load() -> Any:
    raise AssertionError("this plugin must not be imported")


@pytest.fixture(autouse=True)
def empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("KAGENT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KAGENT_CONFIG", os.devnull)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that these plugins, and no others, are installed."""

    def replace_entry_points(*points: Point) -> None:
        found = {"kagent.plugins": list(points)}
        monkeypatch.setattr(importlib_metadata, "entry_points", lambda group: found.get(group, []))

    return replace_entry_points


def call(*args: str) -> str:
    """Run a command that must succeed and return what it prints, without a word on stderr."""
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def row_of(output: str, start: str) -> str:
    table, _, _ = output.partition("\n\n")
    [row] = [line for line in table.splitlines() if line.startswith(start + " ")]
    return row


# -- devices ------------------------------------------------------------------------------------------


def test_devices_tells_state_and_reason(install: Callable[..., None]) -> None:
    install(Point("cpu", lambda: plugin_with(CPU)), Point("toy", lambda: plugin_with(ABSENT, EMULATED)))
    output = call("devices")
    cpu = row_of(output, "cpu").split()
    assert cpu == ["cpu", "available", "Some", "Processor", "1.5", "GiB", "kagent-cpu", "threads", "2"]
    assert "not available" in row_of(output, "toy:0")
    assert "available, emulated" in row_of(output, "toy:1")
    assert "toy:0 is not available: no driver found; install toy-driver" in output
    assert "device = auto: programs run on cpu" in output


def test_devices_of_a_broken_plugin_is_a_row_like_any_other(install: Callable[..., None]) -> None:
    def load() -> Any:
        raise ImportError("no module named 'driver'")

    install(Point("broken", load), Point("cpu", lambda: plugin_with(CPU)))
    output = call("devices")
    assert "not available" in row_of(output, "broken")
    assert "no module named 'driver'" in output
    assert "available" in row_of(output, "cpu")


def test_devices_without_a_plugin_says_how_to_get_one(install: Callable[..., None]) -> None:
    install()
    output = call("devices")
    assert "no device plugin is installed" in output
    assert "pip install kagent-cpu" in output
    assert json.loads(call("devices", "--json")) == []


def test_devices_says_when_the_configured_one_is_not_there(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Point("cpu", lambda: plugin_with(CPU)), Point("toy", lambda: plugin_with(ABSENT)))
    monkeypatch.setenv("KAGENT_DEVICE", "toy")
    assert "device = toy: device 'toy' cannot be used: no driver found" in call("devices")


def test_devices_as_json(install: Callable[..., None]) -> None:
    install(Point("cpu", lambda: plugin_with(CPU)), Point("toy", lambda: plugin_with(ABSENT, EMULATED)))
    cpu, absent, emulated = json.loads(call("devices", "--json"))
    assert cpu == {
        "device": "cpu",
        "name": "Some Processor",
        "available": True,
        "reason": None,
        "emulated": False,
        "plugin": "kagent-cpu",
        "memory_nbytes": 3 * 2**29,
        "max_threads_per_block": 1,
        "shared_nbytes": 0,
        "max_parameters": 128,
        "details": {"threads": "2"},
    }
    assert (absent["device"], absent["available"]) == ("toy:0", False)
    assert absent["reason"] == "no driver found; install toy-driver"
    assert emulated["emulated"] is True


# -- plugins ------------------------------------------------------------------------------------------


def test_plugins_lists_without_importing(install: Callable[..., None]) -> None:
    install(Point("cpu", fail_to_load), Point("toy", fail_to_load, "toy.plugin"))
    output = call("plugins")
    toy = row_of(output, "toy").split()
    assert toy == ["toy", "a", "device", "listed", "kagent-toy", "1.2", "toy.plugin"]
    assert row_of(output, "cpu").split()[3] == "listed"


def test_plugins_says_why_one_cannot_be_used(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_PLUGINS_BLOCK", "toy")
    install(Point("toy", fail_to_load), Point("cpu", fail_to_load, "a"), Point("cpu", fail_to_load, "b"))
    assert "blocked by config" in row_of(call("plugins"), "toy")
    cpu, toy = json.loads(call("plugins", "--json"))
    assert cpu["state"] == "conflict"
    assert "'kagent-cpu' (a) and 'kagent-cpu' (b)" in cpu["reason"]
    assert toy == {
        "name": "toy",
        "group": "kagent.plugins",
        "distribution": "kagent-toy",
        "version": "1.2",
        "target": "some.module",
        "state": "blocked",
        "reason": "blocked by config: plugins_block names it",
    }


def test_plugins_without_any_says_how_to_get_one(install: Callable[..., None]) -> None:
    install()
    assert "pip install kagent-cpu" in call("plugins")
    assert json.loads(call("plugins", "--json")) == []


# -- config ------------------------------------------------------------------------------------------


def test_config_tells_where_values_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kagent.toml").write_text('device = "toy:1"\n')
    monkeypatch.delenv("KAGENT_CONFIG")
    monkeypatch.setenv("KAGENT_FUSION", "false")
    output = call("config")
    assert row_of(output, "device").split()[1:3] == ["toy:1", "file"]
    assert row_of(output, "fusion").split()[1:4] == ["false", "environment", "KAGENT_FUSION"]
    assert row_of(output, "threads").split()[1:3] == ["none", "default"]
    assert row_of(output, "plugins_block").split()[1:3] == ["(empty)", "default"]


def test_config_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kagent.toml"
    path.write_text('plugins_block = ["toy"]\n')
    monkeypatch.delenv("KAGENT_CONFIG")
    monkeypatch.setenv("KAGENT_THREADS", "3")
    shown = json.loads(call("config", "--json"))
    assert set(shown) == set(Config.model_fields)
    assert shown["plugins_block"]["value"] == ["toy"]
    assert shown["plugins_block"]["source"] == {"kind": "file", "key": "plugins_block", "path": str(path)}
    assert shown["threads"]["value"] == 3
    assert shown["threads"]["source"] == {"kind": "environment", "key": "KAGENT_THREADS", "path": None}
    assert shown["device"]["source"]["kind"] == "default"
    assert all(row["description"] for row in shown.values())


# -- errors ------------------------------------------------------------------------------------------


def test_an_error_is_one_message_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_DEVISE", "cpu")
    result = CliRunner().invoke(app, ["devices"])
    assert result.exit_code == 1
    assert result.stdout == ""
    first, hint = result.stderr.splitlines()
    assert first == "error: unknown environment variable KAGENT_DEVISE"
    assert hint.startswith("  hint: did you mean 'KAGENT_DEVICE'?")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_DEVISE", "cpu")
    result = CliRunner().invoke(app, ["--debug", "devices"])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["demo", "--text", "nowhere"], "--text was given without a question"),
        (["run", "nowhere.py"], "cannot read the script 'nowhere.py': No such file or directory"),
        (["run", "."], "'.' is a directory, expected a Python script"),
    ],
)
def test_what_cannot_work_is_said_before_torch_is_imported(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1
    assert message in result.stderr


def test_version() -> None:
    assert call("--version") == f"kagent {kagent_core.__version__}\n"


def test_help_names_every_command() -> None:
    output = call("--help")
    for command in ("devices", "plugins", "config", "run", "demo", "bench"):
        assert f" {command} " in output


@pytest.mark.parametrize("command", [[], ["kernels"], ["bench"]])
def test_no_flag_looks_as_if_it_took_a_value(command: list[str]) -> None:
    output = call(*command, "--help")
    assert "--help" in output
    assert "bool" not in output.lower()


# -- the process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["--help"], ["devices"], ["plugins"], ["config"]])
def test_listing_does_not_import_torch(command: list[str]) -> None:
    program = f"""
import sys
sys.argv = ["kagent", *{command!r}]
from kagent_core.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
heavy = {{"torch", "transformers", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    # OpenCL devices can only be listed by pyopencl, which imports numpy
    environment = {**os.environ, "KAGENT_PLUGINS_BLOCK": "opencl"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
