"""Wheels as `make dist` builds them, and an environment that has nothing but what they bring."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def run(command: Sequence[str | Path], *, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command far from this checkout's settings; its output, both streams, is in ``stdout``."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KAGENT_", "PYTEST_", "COV_", "COVERAGE_", "PYTHON", "TORCH"))
    }
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"COLUMNS": "200", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if check and result.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}\nexit status {result.returncode}\n{result.stdout}")
    return result


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and an empty folder outside of the checkout to run things in."""

    prefix: Path
    wheels: Path
    cwd: Path

    def python(self, source: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python source as a script."""
        script = self.cwd / "script.py"
        script.write_text(source, encoding="utf-8")
        return run([self.prefix / "bin" / "python", script], cwd=self.cwd, check=check)

    def kagent(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command `kagent`."""
        return run([self.prefix / "bin" / "kagent", *arguments], cwd=self.cwd, check=check)

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the environment's pip."""
        return run([self.prefix / "bin" / "python", "-m", "pip", *arguments], cwd=self.cwd)

    def installed(self) -> set[str]:
        """Names of the distributions that are installed."""
        return {entry["name"] for entry in json.loads(self.pip("list", "--format", "json").stdout)}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `make dist` fills, built by the environment that runs this test."""
    folder = tmp_path_factory.mktemp("dist")
    # the environment is the one that runs this test, whatever made it: its stamp must not be remade
    stamp = f"--old-file={sys.prefix}/.ready"
    run(["make", "--no-print-directory", stamp, "dist", f"VENV={sys.prefix}", f"DIST={folder}"], cwd=ROOT)
    return folder


@pytest.fixture(scope="session")
def environment(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """A clean environment with `kagent-cpu` installed by its name from the folder of wheels."""
    prefix = tmp_path_factory.mktemp("environment")
    environment = Environment(prefix, wheels, tmp_path_factory.mktemp("cwd"))
    run([sys.executable, "-m", "venv", prefix], cwd=environment.cwd)
    report = environment.cwd / "report.json"
    # no bytecode is compiled ahead: only a few of torch's modules are imported
    options = ("-qq", "--no-compile", "--constraint", CONSTRAINTS, "--find-links", wheels, "--report", report)
    environment.pip("install", *options, "kagent-cpu")
    origins = {
        entry["metadata"]["name"]: entry["download_info"]["url"]
        for entry in json.loads(report.read_text(encoding="utf-8"))["install"]
    }
    for name in ("kagent-cpu", "kagent-torch"):
        assert origins[name].startswith(wheels.as_uri()), f"{name} came from {origins[name]}, not from {wheels}"
    yield environment
    shutil.rmtree(prefix)  # about 1 GB


@pytest.fixture
def without_plugin(environment: Environment) -> Iterator[Environment]:
    """The same environment while `kagent-cpu` is uninstalled."""
    environment.pip("uninstall", "-qq", "--yes", "kagent-cpu")
    yield environment
    environment.pip("install", "-qq", "--no-deps", "--no-index", "--find-links", environment.wheels, "kagent-cpu")
