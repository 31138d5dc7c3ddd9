"""``kagent run``: a script runs as it does with Python, but for its default backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kagent_core.config import load_config
from kagent_core.default_backend import default_backend
from kagent_core.session import session_for

KAGENT = [sys.executable, "-m", "kagent_core.cli", "run"]
PREAMBLE = """
import sys, torch
from kagent_core.config import load_config
from kagent_core.session import session_for

session = session_for(load_config({"device": "cpu"}))
x = torch.arange(6.0)

def plans(compiled, *args):
    before = len(session.reports)
    result = compiled(*args)
    return len(session.reports) - before, result
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def execute(command: list[str], *args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KAGENT_")}
    environment["KAGENT_CONFIG"] = os.devnull
    return subprocess.run(
        [*command, *map(str, args)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def run(script: Path, *args: str, options: tuple[str, ...] = ("--device", "cpu")) -> Any:
    """Run a script with ``kagent run``."""
    return execute(KAGENT, *options, script, *args, cwd=script.parent)


def output_of(script: Path, *args: str) -> str:
    result = run(script, *args)
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


# -- as with Python ------------------------------------------------------------------------------------------


def test_a_script_sees_what_it_sees_with_python(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "sibling.py").write_text("VALUE = 7\n")
    target = tmp_path / "real" / "script.py"
    target.write_text(
        """
import inspect, pickle, sys
import sibling

class Point:
    def __init__(self, x):
        self.x = x

print(sys.argv, sys.path[0], sibling.VALUE)
print(__name__, __file__, __spec__, __package__, __doc__, type(__loader__), type(__builtins__))
print(sys.modules["__main__"].__dict__ is globals(), pickle.loads(pickle.dumps(Point(3))).x)
print(inspect.getsource(Point).splitlines()[0], sorted(set(globals()) - {"__annotations__"}))
"""
    )
    (tmp_path / "link.py").symlink_to(target)
    for name in ("link.py", "real/script.py", str(target)):
        args = (name, "one", "--help", "--device", "x", "--", "-q")
        plain = execute([sys.executable], *args, cwd=tmp_path)
        through_kagent = execute(KAGENT, *args, cwd=tmp_path)
        assert plain.returncode == 0, plain.stderr
        assert (through_kagent.stdout, through_kagent.stderr) == (plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a message')",
        "raise SystemExit",
        "def f():\n    1 / 0\nf()",
        "try:\n    {}['key']\nexcept KeyError:\n    raise ValueError('chained')",
        "def broken(:\n",
        "import sys\nsys.excepthook = lambda *error: print('own hook', error[1])\n1 / 0",
        "import typer\nraise typer.BadParameter('not for kagent to handle')",
        "import atexit\natexit.register(print, 'at exit')\nprint('here')",
        "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    ],
)
def test_a_script_ends_as_it_does_with_python(script: Path, source: str) -> None:
    script.write_text(source)
    plain = execute([sys.executable], script, cwd=script.parent)
    through_kagent = run(script)
    assert through_kagent.returncode == plain.returncode
    assert through_kagent.stdout == plain.stdout
    assert through_kagent.stderr == plain.stderr


def test_an_interrupt_ends_the_script(script: Path) -> None:
    script.write_text("raise KeyboardInterrupt")
    result = run(script)
    assert result.returncode == 130
    assert result.stderr.endswith("KeyboardInterrupt\n")


def test_a_device_that_is_not_there_is_told_before_the_script_starts(script: Path) -> None:
    script.write_text("print('started')")
    result = run(script, options=("--device", "nosuch"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: no installed plugin brings the device type 'nosuch'")
    assert "Traceback" not in result.stderr


# -- the default backend -------------------------------------------------------------------------------------


def test_every_way_to_compile_gets_kagent_unless_it_names_a_backend(script: Path) -> None:
    script.write_text(
        PREAMBLE
        + """
def f(x):
    return torch.relu(x - 2) + 1

@torch.compile
def decorated(x):
    return torch.relu(x - 3) + 1

@torch.compile(dynamic=False)
def decorated_with_arguments(x):
    return torch.relu(x - 4) + 1

class InPlace(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x - 5) + 1

class Module(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x - 6) + 1

in_place = InPlace()
in_place.compile()
module = torch.compile(Module())

def named(x):
    return torch.relu(x - 7) + 1

assert plans(torch.compile(f), x)[0] == 1, "function"
assert plans(decorated, x)[0] == 1, "decorator"
assert plans(decorated_with_arguments, x)[0] == 1, "decorator with arguments"
assert plans(in_place, x)[0] == 1, "Module.compile"
assert plans(module, x)[0] == 1, "module"
assert plans(torch.compile(named, backend="eager"), x)[0] == 0, "named"
assert plans(torch.compile(backend="aot_eager")(named), x)[0] == 0, "named in a decorator"
assert plans(torch.compile(named, disable=True), x)[0] == 0, "disabled"
print(plans(torch.compile(lambda x: x + 1), x)[1].tolist())
"""
    )
    assert output_of(script) == "[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]\n"


def test_options_for_the_default_compiler_are_dropped_with_a_warning(script: Path) -> None:
    script.write_text(
        PREAMBLE
        + """
def f(x):
    return x * 2

print(plans(torch.compile(f, options={"epilogue_fusion": True, "max_autotune": True}), x)[0])
"""
    )
    result = run(script)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
    [line] = [line for line in result.stderr.splitlines() if "WARNING" in line]
    assert line.endswith("they are dropped: epilogue_fusion, max_autotune")


def test_a_mode_is_passed_on(script: Path) -> None:
    script.write_text(
        PREAMBLE
        + """
def f(x):
    return x * 2

print(plans(torch.compile(f, mode="reduce-overhead"), x)[0])
"""
    )
    result = run(script)
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
    assert "reduce-overhead" in result.stderr


def test_it_lasts_until_the_scripts_threads_have_ended(script: Path) -> None:
    script.write_text(
        """
import threading, torch

def late():
    threading.main_thread().join()
    print(torch.compile.__code__.co_filename)

threading.Thread(target=late).start()
"""
    )
    assert output_of(script).strip().endswith("default_backend.py")


# -- the context manager -------------------------------------------------------------------------------------


def test_torch_compile_is_restored() -> None:
    def fail_inside() -> None:
        with default_backend():
            outer = torch.compile
            assert outer is not original
            with default_backend({"device": "cpu"}):
                assert torch.compile is not outer
            assert torch.compile is outer
            raise ZeroDivisionError

    original = torch.compile
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert torch.compile is original


def test_its_options_reach_kagent() -> None:
    session = session_for(load_config({"device": "cpu", "plan_cache_size": 3}))
    before = len(session.reports)
    with default_backend({"device": "cpu", "plan_cache_size": 3}):
        tripled = torch.compile(lambda x: 3 * x)
    assert tripled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert len(session.reports) == before + 1


def test_an_option_of_dynamo_itself_is_kept() -> None:
    asked: list[int] = []

    def keep_all(guards: Any) -> list[bool]:
        asked.append(len(guards))
        return [True] * len(guards)

    options = {"guard_filter_fn": keep_all}
    with default_backend({"device": "cpu"}):
        compiled = torch.compile(lambda x: 4 * x, options=options)
    assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    assert asked
    assert options == {"guard_filter_fn": keep_all}
