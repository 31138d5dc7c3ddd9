"""What is in the wheels."""

from __future__ import annotations

import configparser
import re
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECTS = {"kagent-torch": ROOT} | {path.parent.name: path.parent for path in ROOT.glob("plugins/*/pyproject.toml")}

pytestmark = [pytest.mark.packaging, pytest.mark.xdist_group("packaging")]


def wheel_of(wheels: Path, distribution: str) -> zipfile.ZipFile:
    [path] = wheels.glob(f"{distribution.replace('-', '_')}-*.whl")
    return zipfile.ZipFile(path)


def dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    [path] = [path for path in wheel.namelist() if path.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


def entry_points(wheel: zipfile.ZipFile) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(dist_info(wheel, "entry_points.txt"))
    return {group: dict(parser[group]) for group in parser.sections()}


def source_files(package: Path) -> set[str]:
    """A package's files, as a wheel names them."""
    return {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_every_distribution_has_one_wheel(wheels: Path) -> None:
    built = sorted(path.name.split("-")[0] for path in wheels.iterdir())
    assert built == sorted(name.replace("-", "_") for name in PROJECTS)


def test_the_core_has_its_whole_package_and_the_docs_text(wheels: Path) -> None:
    with wheel_of(wheels, "kagent-torch") as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    docs = {
        f"kagent_core/_docs/{path.relative_to(ROOT / 'docs').as_posix()}"
        for path in (ROOT / "docs").rglob("*.md")
        if "_build" not in path.parts
    }
    assert docs, "there are no docs to pack"
    template = {
        f"kagent_core/_plugin_template/{path.relative_to(ROOT / 'plugin_template').as_posix()}"
        for path in (ROOT / "plugin_template").rglob("*")
        if path.is_file()
    }
    assert template, "there is no template to pack"
    assert packed == source_files(ROOT / "kagent_core") | docs | template


@pytest.mark.parametrize("distribution", sorted(PROJECTS.keys() - {"kagent-torch"}))
def test_a_plugin_has_its_whole_package(wheels: Path, distribution: str) -> None:
    with wheel_of(wheels, distribution) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == source_files(PROJECTS[distribution] / "src" / distribution.replace("-", "_"))


@pytest.mark.parametrize("distribution", sorted(PROJECTS))
def test_types_are_declared(wheels: Path, distribution: str) -> None:
    module = "kagent_core" if distribution == "kagent-torch" else distribution.replace("-", "_")
    with wheel_of(wheels, distribution) as wheel:
        assert f"{module}/py.typed" in wheel.namelist()


def test_schemas_are_packed(wheels: Path) -> None:
    with wheel_of(wheels, "kagent-torch") as wheel:
        schemas = [name for name in wheel.namelist() if re.fullmatch(r"kagent_core/inspect/schema/.+\.json", name)]
    assert schemas


def test_entry_points_of_the_core(wheels: Path) -> None:
    with wheel_of(wheels, "kagent-torch") as wheel:
        assert entry_points(wheel) == {
            "console_scripts": {"kagent": "kagent_core.cli:main"},
            "pytest11": {"kagent_conformance": "kagent_core.testing.conformance.pytest_plugin"},
            "torch_dynamo_backends": {"kagent": "kagent_core.backend:kagent"},
        }


def test_entry_points_of_kagent_opencl(wheels: Path) -> None:
    with wheel_of(wheels, "kagent-opencl") as wheel:
        assert entry_points(wheel) == {"kagent.plugins": {"opencl": "kagent_opencl.plugin:plugin"}}


def test_entry_points_of_kagent_cuda(wheels: Path) -> None:
    with wheel_of(wheels, "kagent-cuda") as wheel:
        assert entry_points(wheel) == {"kagent.plugins": {"cuda": "kagent_cuda.plugin:plugin"}}


def test_entry_points_of_kagent_cpu(wheels: Path) -> None:
    with wheel_of(wheels, "kagent-cpu") as wheel:
        assert entry_points(wheel) == {"kagent.plugins": {"cpu": "kagent_cpu.plugin"}}


@pytest.mark.parametrize("distribution", sorted(PROJECTS.keys() - {"kagent-torch"}))
def test_a_plugin_brings_the_core_of_its_version(wheels: Path, distribution: str) -> None:
    with wheel_of(wheels, "kagent-torch") as wheel:
        version = message_from_string(dist_info(wheel, "METADATA"))["Version"]
    with wheel_of(wheels, distribution) as wheel:
        requirements = message_from_string(dist_info(wheel, "METADATA")).get_all("Requires-Dist")
    [core] = [one for one in map(Requirement, requirements or []) if one.name == "kagent-torch"]
    assert core.specifier.contains(version)


def test_constraints_pin_what_the_projects_ask_for() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line.startswith("#"):
            continue
        name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9a-z.]*)", line).groups()
        pins[re.sub(r"[-_.]+", "-", name).lower()] = version
    assert pins["torch"] == "2.13.0"
    for project in PROJECTS.values():
        table = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        wanted = table["dependencies"] + [
            one for extra in table.get("optional-dependencies", {}).values() for one in extra
        ]
        for requirement in map(Requirement, wanted):
            if requirement.name not in PROJECTS:
                assert requirement.specifier.contains(pins[requirement.name]), str(requirement)
