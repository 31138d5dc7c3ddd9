"""Every code block in the README and the docs does what the page says that it does.

Blocks of one page are run in order and share names and a directory:

- ``python``: is run. What it prints is compared with the ``text`` block that follows it, if one does; lines with
  ``>>>`` are compared as doctests.
- ``console``: each ``$ `` line is run and must succeed; the lines below it must be among what it prints. ``cd`` holds
  for the blocks that follow; what ``pip install`` takes from a folder is there for this page alone. A command whose
  exit code the page shows, with ``; echo $?``, must end with that one.
- ``toml``: is read as a config file, or as a plugin's ``pyproject.toml``.

A block of any language that begins with a comment such as ``# src/script.py`` is that file. One that begins with
``# in src/script.py`` is an excerpt: its lines are in the file, one after the other, and ``...`` stands for some more.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kagent_core import session
from kagent_core.config import load_config
from kagent_core.listing import DEVICE_GROUP, STAGE_GROUP

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Not run here, for they take minutes: their options are checked, and tests of their own run them.
SLOW_COMMANDS = ("demo", "bench", "tune")

ASK_EXIT_CODE = "; echo $?"


@dataclass
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    output: str | None = None


@dataclass
class Command:
    """A ``$ `` line of a console block, and what the page says that it prints."""

    environment: dict[str, str]
    words: list[str]
    shown: list[str]
    exit_code: int = 0


def read_blocks(page: Path) -> list[Block]:
    """Return a page's code blocks; a ``text`` block that follows a ``python`` block is its output."""
    blocks: list[Block] = []
    following: Block | None = None
    lines = page.read_text(encoding="utf-8").splitlines()
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if not line.startswith("```"):
            following = following if not line.strip() else None
            continue
        end = lines.index("```", position)
        block = Block(line.removeprefix("```").strip(), "\n".join(lines[position:end]) + "\n", position + 1)
        position = end + 1
        if block.language == "text" and following is not None:
            following.output = block.text
            following = None
            continue
        following = block if block.language == "python" else None
        blocks.append(block)
    return blocks


def read_commands(text: str) -> list[Command]:
    commands: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            words = shlex.split(line.removeprefix("$ ").removesuffix(ASK_EXIT_CODE))
            given = [word for word in words if re.fullmatch(r"[A-Z_]+=.*", word)]
            environment = dict(word.split("=", 1) for word in given)
            commands.append(Command(environment, words[len(given) :], [], -1 if line.endswith(ASK_EXIT_CODE) else 0))
        elif line.strip():
            commands[-1].shown.append(line)
    for command in commands:
        if command.exit_code:
            command.exit_code = int(command.shown.pop())
    return commands


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    # what a page installs is gone after it
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(session, "_sessions", session._Sessions())
    for name in [*os.environ]:
        if name.startswith("KAGENT_") or name == "COLUMNS":
            monkeypatch.delenv(name)
    torch._dynamo.reset()
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo looks the module of a function up
    names = vars(module)
    for block in read_blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        run = RUNNERS.get(block.language)
        named = NAMED.match(block.text)
        if named is not None:
            (check_excerpt if named["excerpt"] else write_file)(block, Path(named["path"]), where)
        elif run is not None:
            run(block, where, names)
        else:
            assert block.language in ("text", "json") or block.language.startswith("{"), where


def write_file(block: Block, path: Path, where: str) -> None:
    assert path.parent.is_dir(), f"{where}: no folder for {path}"
    path.write_text(block.text, encoding="utf-8")


def check_excerpt(block: Block, path: Path, where: str) -> None:
    found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    shown = [line.strip() for line in block.text.splitlines()[1:] if line.strip()]
    position = 0
    for part in "\n".join(shown).split("\n...\n"):
        lines = part.splitlines()
        places = [n for n in range(position, len(found)) if found[n : n + len(lines)] == lines]
        assert places, f"{where} shows\n{part}\nwhich is not in {path}:\n" + "\n".join(found[position:])
        position = places[0] + len(lines)


def run_python(block: Block, where: str, names: dict[str, Any]) -> None:
    if block.text.lstrip().startswith(">>>"):
        run_doctest(block, where, names)
    else:
        filename = f"<{where}>"
        linecache.cache[filename] = (len(block.text), None, block.text.splitlines(keepends=True), filename)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, filename, "exec"), names)
        expected = block.output or ""
        assert printed.getvalue() == expected or doctest.OutputChecker().check_output(
            expected, printed.getvalue(), doctest.ELLIPSIS
        ), f"{where} printed\n{printed.getvalue()}"


def run_doctest(block: Block, where: str, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, where, where, block.line)
    test.globs = names  # the parser's copy would keep new names from the blocks that follow
    report = io.StringIO()
    results = doctest.DocTestRunner(optionflags=LOOSE).run(test, out=report.write, clear_globs=False)
    assert results.attempted
    assert not results.failed, f"{where}\n{report.getvalue()}"


def run_console(block: Block, where: str, names: dict[str, Any]) -> None:
    commands = read_commands(block.text)
    assert commands, f"{where} has no command"
    for command in commands:
        program, *arguments = command.words
        assert program in PROGRAMS, f"{where}: '{program}' is not a command that the docs may show"
        PROGRAMS[program](command, arguments, where)


def run_kagent(command: Command, arguments: list[str], where: str) -> None:
    if arguments[0] in SLOW_COMMANDS or is_whole_conformance(arguments):
        words = [argument for argument in arguments if re.fullmatch(r"[a-z]+", argument)]
        path = words[: 2 if words[0] == "bench" else 1]
        told = run_program(["-m", "kagent_core.cli", *path, "--help"], {}, where)
        for option in (argument for argument in arguments if argument.startswith("--")):
            assert re.search(rf"{option}\b", told), f"{where}: kagent {path[0]} has no option {option}"
        return
    run_and_compare(["-m", "kagent_core.cli", *arguments], command, where)


def is_whole_conformance(arguments: list[str]) -> bool:
    """Whether all levels are asked for: it takes many minutes."""
    return arguments[0] == "conformance" and not {"--level", "--only"} & {*arguments}


def run_script(command: Command, arguments: list[str], where: str) -> None:
    if arguments[:2] == ["-m", "pip"]:
        install(arguments[2:], where)
    elif arguments[:2] == ["-m", "build"]:  # without an environment of its own, for which it would ask an index
        run_and_compare([*arguments, "--no-isolation"], command, where)
    else:
        run_and_compare(arguments, command, where)


def change_folder(command: Command, arguments: list[str], where: str) -> None:
    [folder] = arguments
    os.chdir(folder)


def run_and_compare(arguments: list[str], command: Command, where: str) -> None:
    output = run_program(arguments, command.environment, where, command.exit_code)
    told = {without_numbers(line) for line in output.splitlines()}
    for line in command.shown:
        assert without_numbers(line) in told, f"{where} shows\n{line}\nwhich is not among\n" + "\n".join(sorted(told))


def run_program(arguments: list[str], environment: dict[str, str], where: str, exit_code: int = 0) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=240
    )
    told = (done.stdout + done.stderr).replace(f"{Path.cwd()}/", "")
    assert done.returncode == exit_code, f"{where}: {shlex.join(command)} ended with {done.returncode}\n{told}"
    return told


def without_numbers(line: str) -> str:
    """Return what of a line of output is the same on every machine."""
    if re.match(r"cpu +available ", line):
        return "cpu available"  # the rest is the machine's
    line = re.sub(r"(?<=\w_)[0-9a-f]{10}\b", "#", line)  # a generated kernel's hash, which goes with its text
    return re.sub(r"─+|={3,}", "─", re.sub(r"0x[0-9a-f]+|\d+(\.\d+)*", "#", " ".join(line.split())))


def check_make(command: Command, arguments: list[str], where: str) -> None:
    targets = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in (argument for argument in arguments if "=" not in argument):
        assert target in targets, f"{where}: the Makefile has no target '{target}'"


def install(arguments: list[str], where: str) -> None:
    """Install what is in a folder for the page's commands: its text is taken from the folder, so that edits count."""
    verb, option, requirement = arguments
    assert (verb, option) == ("install", "-e"), where
    folder, extra = re.fullmatch(r"(\.[\w./-]*)(?:\[(\w+)\])?", requirement).groups()  # type: ignore[union-attr]
    project = tomllib.loads(Path(folder, "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra is None or extra in project["optional-dependencies"], f"{where}: {requirement}"
    site = Path(".venv", "site").resolve()
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    run_program(["-m", "pip", "install", *offline, "--target", str(site), folder], {}, where)
    places = [str(Path(folder, "src").resolve()), str(site)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*places, os.environ["PYTHONPATH"]]))
    sys.path[:0] = places
    importlib.invalidate_caches()


def check_pip(command: Command, arguments: list[str], where: str) -> None:
    ours = {}
    for path in (ROOT / "pyproject.toml", *ROOT.glob("plugins/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        ours[project["name"]] = set(project.get("optional-dependencies", {}))
    assert arguments[0] == "install", where
    for requirement in arguments[1:]:
        named = re.fullmatch(r"([\w-]+)(?:\[([\w,]+)\])?", requirement)
        assert named is not None, f"{where}: {requirement}"
        assert named[1] in ours, f"{where}: no distribution here is named {named[1]}"
        assert set(filter(None, (named[2] or "").split(","))) <= ours[named[1]], f"{where}: {requirement}"


def check_toml(block: Block, where: str, names: dict[str, Any]) -> None:
    table = tomllib.loads(block.text)
    if "project" in table:
        assert set(table["project"]["entry-points"]) <= {DEVICE_GROUP, STAGE_GROUP}, where
        return
    folder = Path(f"config-{block.line}")
    folder.mkdir()
    path = folder / ("pyproject.toml" if "tool" in table else "kagent.toml")
    path.write_text(block.text, encoding="utf-8")
    load_config(config_file=path)


NAMED = re.compile(r"(?:#|//) (?P<excerpt>in )?(?P<path>[\w./-]+\.(?:py|toml|c|cl|cu))\n")
RUNNERS: dict[str, Callable[[Block, str, dict[str, Any]], None]] = {
    "python": run_python,
    "console": run_console,
    "toml": check_toml,
}
PROGRAMS: dict[str, Callable[[Command, list[str], str], None]] = {
    "kagent": run_kagent,
    "python": run_script,
    "make": check_make,
    "pip": check_pip,
    "cd": change_folder,
}
