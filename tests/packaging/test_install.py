"""A user's way: install the plugin by its name, run a model, and uninstall it again."""

from __future__ import annotations

import json

import pytest

from .conftest import Environment

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.slow,
    pytest.mark.xdist_group("packaging"),
    pytest.mark.timeout(900),  # the first test waits for the environment, and torch is a large download
]

MODEL = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
)
x = torch.randn(8, 16)
"""

COMPARE = """
with torch.no_grad():
    actual, expected = torch.compile(model, backend="kagent")(x), model(x)
torch.testing.assert_close(actual, expected)
compiled = torch.compile(model, backend="kagent")
compiled(x).square().sum().backward()
gradients = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
model(x).square().sum().backward()
torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])
print("used", sorted({"kagent_core", "kagent_cpu"} & sys.modules.keys()))
"""


def test_a_plugin_brings_all_that_it_needs(environment: Environment) -> None:
    assert {"kagent-cpu", "kagent-torch", "torch"} <= environment.installed()
    environment.pip("check")


def test_a_compiled_model_equals_eager(environment: Environment) -> None:
    output = environment.python(MODEL + COMPARE).stdout
    assert "used ['kagent_core', 'kagent_cpu']" in output


def test_devices_lists_the_plugin(environment: Environment) -> None:
    assert "cpu" in environment.kagent("devices").stdout
    assert "kagent-cpu" in environment.kagent("devices", "--json").stdout
    json.loads(environment.kagent("devices", "--json").stdout)


def test_without_a_plugin_compile_says_how_to_get_one(without_plugin: Environment) -> None:
    result = without_plugin.python(MODEL + COMPARE, check=False)
    assert result.returncode != 0
    assert "no device plugin is installed" in result.stdout
    assert "pip install kagent-cpu" in result.stdout


def test_without_a_plugin_devices_says_how_to_get_one(without_plugin: Environment) -> None:
    assert "pip install kagent-cpu" in without_plugin.kagent("devices", check=False).stdout


def test_without_a_plugin_other_backends_work(without_plugin: Environment) -> None:
    source = MODEL + 'torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))\nprint("equal")\n'
    assert without_plugin.python(source).stdout.splitlines()[-1] == "equal"
