"""An author's way: make a plugin of each shape, install it, run its tests, and prove it with the conformance kit."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from .conftest import CONSTRAINTS, Environment, run

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.slow,
    pytest.mark.xdist_group("packaging"),
    pytest.mark.timeout(1800),  # the first test waits for the environment, and torch is a large download
]


# the page on writing a plugin installs and runs both shapes; the nightly run has both here, too
@pytest.fixture(scope="module", params=["toy", pytest.param("npu", marks=pytest.mark.nightly)])
def plugin(request: pytest.FixtureRequest, environment: Environment) -> Iterator[str]:
    """The device type of a plugin that was made and installed."""
    name: str = request.param
    shape = {"toy": "language", "npu": "kernels"}[name]
    environment.kagent("new-plugin", name, "--shape", shape, "--author", "Somebody", "--defaults")
    options = ("-qq", "--no-compile", "--constraint", CONSTRAINTS, "--find-links", environment.wheels)
    environment.pip("install", *options, f"./kagent-{name}[test]")
    yield name
    environment.pip("uninstall", "-qq", "--yes", f"kagent-{name}")


def test_it_is_listed(plugin: str, environment: Environment) -> None:
    listed = json.loads(environment.kagent("devices", "--json").stdout)
    [mine] = [entry for entry in listed if entry["device"] == f"{plugin}:0"]
    assert mine["plugin"] == f"kagent-{plugin}"
    assert mine["emulated"] is True


def test_its_own_tests_pass(plugin: str, environment: Environment) -> None:
    folder = environment.cwd / f"kagent-{plugin}"
    done = run([environment.prefix / "bin" / "python", "-m", "pytest", "-q"], cwd=folder)
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(("part", "least"), [("2/nn.functional.l*", 9), ("3/*softmax*", 2), ("4/mlp*", 2)])
def test_it_conforms(plugin: str, part: str, least: int, environment: Environment) -> None:
    arguments = ("conformance", f"{plugin}:0", "--only", part, "--json", "report.json", "--html", "report.html")
    environment.kagent(*arguments)
    report = json.loads((environment.cwd / "report.json").read_text(encoding="utf-8"))
    outcomes = [finding["outcome"] for finding in report["findings"]]
    assert outcomes.count("native") + outcomes.count("fallback") >= least
    assert "failed" not in outcomes
    assert (environment.cwd / "report.html").stat().st_size > 1000
