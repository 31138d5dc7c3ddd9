"""The plugin template renders a small, complete plugin, and refuses what no plugin can be called."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kagent_core.cli import app
from kagent_core.device import Runtime
from kagent_core.errors import KagentError
from kagent_core.plugin_template import LICENSES, SHAPES, render

MOST_METHODS = 8
MOST_LINES = 150


def code_of(path: Path) -> list[str]:
    """A module's lines without blank ones, comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docs.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return [line for number, line in lines if number not in docs and line.strip() and not line.strip().startswith("#")]


def test_what_an_author_writes_is_little(tmp_path: Path) -> None:
    """The runtime and the list of devices; the other methods that are there have defaults."""
    render("toy", tmp_path / "toy", {}, ask=False)
    module = tmp_path / "toy" / "src" / "kagent_toy"
    tree = ast.parse((module / "device.py").read_text(encoding="utf-8"))
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert methods - {"__init__", "synchronize"} == Runtime.__abstractmethods__
    assert len(methods - {"synchronize"} | {"devices"}) <= MOST_METHODS
    assert sum(len(code_of(path)) for path in module.glob("*.py")) <= MOST_LINES


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_rendered(tmp_path: Path, shape: str) -> None:
    render("my_npu2", tmp_path / "out", {"shape": shape, "author": "Ada & Co", "license": "MIT"}, ask=False)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    module = {f"src/kagent_my_npu2/{n}.py" for n in ("__init__", "plugin", "device", "kernels", "packer", "deriver")}
    tests = {"tests/test_my_npu2.py", "tests/test_conformance.py"}
    rest = {"pyproject.toml", "README.md", "LICENSE", ".gitignore", ".github/workflows/ci.yml"}
    data = {"src/kagent_my_npu2/py.typed", "src/kagent_my_npu2/conformance.toml"}
    assert found == module | tests | rest | data
    project = tomllib.loads((tmp_path / "out" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "kagent-my-npu2"
    assert project["authors"] == [{"name": "Ada & Co"}]
    assert project["entry-points"]["kagent.plugins"] == {"my_npu2": "kagent_my_npu2.plugin:plugin"}
    assert (tmp_path / "out" / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")
    texts = [(tmp_path / "out" / name).read_text(encoding="utf-8") for name in found]
    assert not any("{{" in text or "{%" in text for text in texts if "jobs:" not in text)
    assert not any(str(tmp_path) in text for text in texts)


@pytest.mark.parametrize("license_name", LICENSES)
def test_every_license_has_its_text(tmp_path: Path, license_name: str) -> None:
    render("toy", tmp_path / "toy", {"license": license_name}, ask=False)
    text = (tmp_path / "toy" / "LICENSE").read_text(encoding="utf-8")
    assert "The kagent-toy authors" in text
    assert text.count("\n") in range(1, 40)


@pytest.mark.parametrize(
    ("name", "answers", "told"),
    [
        ("Toy", {}, "'Toy' is not a device type"),
        ("1st", {}, "kagent new-plugin st"),
        ("cpu", {}, "'cpu' is kagent's own"),
        ("toy", {"shape": "languag"}, "did you mean 'language'?"),
        ("toy", {"license": "GPL"}, "license is 'GPL', expected Apache-2.0, MIT, BSD-3-Clause or Proprietary"),
        ("toy", {"author": 'A "B" C'}, "expected one line without double quotes"),
        ("toy", {"title": " "}, "title is ' '"),
    ],
)
def test_what_cannot_be_rendered(tmp_path: Path, name: str, answers: dict[str, str], told: str) -> None:
    with pytest.raises(KagentError) as error:
        render(name, tmp_path / "out", answers, ask=False)
    assert told in str(error.value)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(KagentError, match="is not empty, and nothing in it is overwritten"):
        render("toy", tmp_path, {}, ask=False)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new-plugin", "my_npu", "--shape", "kernels", "--title", "My NPU", "--defaults"])
    assert done.exit_code == 0, done.output
    assert "cd kagent-my-npu\n" in done.output
    assert "kagent conformance my_npu:0" in done.output
    assert '"My NPU (emulated)"' in (tmp_path / "kagent-my-npu/src/kagent_my_npu/plugin.py").read_text("utf-8")
    again = CliRunner().invoke(app, ["new-plugin", "my_npu", "--defaults"])
    assert again.exit_code == 1
