"""What someone is told who gets a first kernel, plugin or config slightly wrong."""

import logging
import re

import numpy as np
import pytest
import torch

import kagent_core
from kagent_core import hookimpl
from kagent_core.config import Config
from kagent_core.device import CONTRACT_VERSION
from kagent_core.errors import (
    ConfigError,
    DeviceError,
    KagentError,
    KernelExecutionError,
    LaunchConfigError,
    PluginError,
    RegistryError,
    SignatureError,
)
from kagent_core.kernels import override
from kagent_core.plugins import PluginManager
from kagent_core.registry import KernelRegistry
from kagent_core.specs import LaunchConfig
from kagent_core.testing.fake import FakeDevice, FakeRuntime

X = torch.ones(2, 3)


def relu(**options):
    return kagent_core.compile(torch.relu, **({"device": "cpu"} | options))(X)


def test_a_dump_directory_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match=r"dump: '.*taken' is a file, expected a directory"):
        kagent_core.compile(torch.relu, device="cpu", dump=tmp_path / "taken")(X)


@pytest.mark.parametrize(
    ("fields", "told", "hint"),
    [
        ({"layout": "contiguous"}, "its layout is 'contiguous', expected a Layout", "kagent_core.layout.CONTIGUOUS"),
        ({"layouts": {"self": "contiguous"}}, "its layout for 'self' is 'contiguous'", "kagent_core.layout.CONTIGUOUS"),
        ({"layouts": "contiguous"}, "its layouts are 'contiguous', expected a mapping", "layout= is for every tensor"),
        ({"dtypes": {torch.float32}}, "its dtypes have torch.float32, expected names", 'write dtypes={"float32"}'),
        ({"dtypes": torch.float32}, "its dtypes are torch.float32, expected a set", 'write dtypes={"float32"}'),
        ({"dtypes": "float32"}, "its dtypes are 'float32', expected a set", 'write dtypes={"float32"}'),
        ({"dtypes": {"flaot32"}}, "it takes the dtype 'flaot32', which torch does not have", "'float32'"),
        ({"priority": "high"}, "its priority is 'high', expected a whole number", "0 by default"),
        ({"parameters": ["x"]}, "its parameters have 'x', expected a kagent_core.specs.Parameter", "source"),
        ({"dtype": {"float32"}}, "'dtype' is no field of a kernel", "did you mean 'dtypes'?"),
        ({"layouts": {"foo": kagent_core.layout.CONTIGUOUS}}, "the tensor 'foo', which it has a layout for,", None),
    ],
)
def test_a_field_of_a_kernel(fields, told, hint):
    with pytest.raises(RegistryError) as caught:
        kagent_core.kernel("aten::relu", torch.relu, device="cpu", name="mine", **fields)
    assert caught.value.message.startswith(f"kernel 'mine' for aten::relu: {told}")
    assert hint is None or hint in caught.value.hint


def test_a_field_of_a_plugins_kernel():
    with pytest.raises(RegistryError, match=r"'layuot' is no field of a kernel\n.*did you mean 'layout'"):
        KernelRegistry("toy").kernel("aten::relu", layuot=None)(torch.relu)


def test_an_operator_without_its_overload():
    with pytest.raises(SignatureError) as caught:
        kagent_core.kernel("aten::add", torch.add, device="cpu")
    assert caught.value.hint.startswith("the overloads are aten::add.Scalar, ")
    with pytest.raises(SignatureError, match=r"did you mean 'aten::add\.(?!out)"):
        kagent_core.kernel("aten::addd", torch.add, device="cpu")


def test_a_launch_config_as_the_config_spells_it(caplog):
    with caplog.at_level(logging.WARNING, "kagent"), kagent_core.force_launch_config("no_such", "4,2,1/16,8,1/64"):
        pass
    assert str(LaunchConfig((4, 2, 1), (16, 8, 1), 64)) in caplog.text


@pytest.mark.parametrize("config", ["4,4/16", (4, 4, 1), None])
def test_what_is_no_launch_config(config):
    told = re.escape(f"the launch config for 'aten::relu' is {config!r}, expected a launch config\n  hint: write grid")
    with pytest.raises(LaunchConfigError, match=told), kagent_core.force_launch_config("aten::relu", config):
        pass


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (np.ones((2, 3), np.float32), "a numpy.ndarray"),
        (None, "None"),
        ((X, X), "a tuple"),
        (torch.ones(1, 3), "f32[1, 3]"),
        (torch.ones(2, 3, dtype=torch.float64), "f64[2, 3]"),
    ],
)
def test_what_a_kernel_returns(returned, told):
    with (
        override("aten::relu", lambda x: returned, device="cpu"),
        pytest.raises(KernelExecutionError, match=re.escape(f"the kernel returned {told}, expected f32[2, 3]")),
    ):
        relu()


class Lists:
    """A plugin that lists what it is told to."""

    def __init__(self, devices):
        self.devices = devices

    @hookimpl
    def kagent_contract_version(self):
        return CONTRACT_VERSION

    @hookimpl
    def kagent_devices(self, config):
        return self.devices


@pytest.mark.parametrize(("devices", "told"), [(["np"], "'np'"), ("np", "'np'"), (3, "3")])
def test_devices_that_are_none(devices, told):
    with pytest.raises(PluginError) as caught, kagent_core.use_plugin(Lists(devices), "mine"):
        relu()
    assert "plugin 'mine'" in caught.value.message
    assert f"kagent_devices gave {told}, expected a list of DeviceInfo" in caught.value.message


@pytest.mark.parametrize("plugin", ["npdev", 3, object(), None])
def test_what_is_no_plugin(plugin):
    told = re.escape(f"{plugin!r} is no plugin: it implements none of kagent's hooks")
    with pytest.raises(PluginError, match=told), kagent_core.use_plugin(plugin):
        pass


def test_a_placed_operator_that_torch_does_not_have():
    with pytest.raises(ConfigError, match=r"key placement: .* no operator 'aten::srt'\n.*did you mean 'aten::sqrt'"):
        relu(placement={"aten::srt": "cpu"})
    relu(placement={"later::defined": "cpu"})


def test_names_in_the_config_that_no_plugin_bears(caplog):
    with caplog.at_level(logging.WARNING, "kagent"):
        PluginManager(Config(plugins_block=("cpuu", "nothing"), emulate="openclx"))
    assert caplog.messages[0] == "config key plugins_block has 'cpuu', but no plugin is named so; did you mean 'cpu'?"
    assert caplog.messages[1] == "config key plugins_block has 'nothing', but no plugin is named so"
    assert caplog.messages[2].startswith("config key emulate has 'openclx', but no plugin brings that device type")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"fallback_device": "gpu"}, "config key fallback_device: "),
        ({"placement": {"aten::relu": "gpu"}}, "config key placement of aten::relu: "),
        ({"device": "gpu"}, ""),
    ],
)
def test_a_device_type_that_nobody_brings(options, key):
    with pytest.raises(DeviceError) as caught, kagent_core.use_plugin(FakeDevice()):
        relu(**({"device": "fake"} | options))
    assert caught.value.message.startswith(f"{key}no installed plugin brings the device type 'gpu'")
    assert "did you mean" not in caught.value.hint


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"plugins_block": "cpu"}, "take 'cpu' out of plugins_block"),
        ({"plugins_allow": "opencl"}, "add 'cpu' to plugins_allow"),
    ],
)
def test_a_blocked_plugin(options, hint):
    with pytest.raises(PluginError) as caught:
        relu(**options)
    assert caught.value.hint == hint


def test_a_kernel_that_cannot_be_loaded(monkeypatch):
    def load(self, kernel):
        raise OSError("no such library")

    monkeypatch.setattr(FakeRuntime, "load", load)
    with kagent_core.use_plugin(FakeDevice()), pytest.raises(KernelExecutionError) as caught:
        relu(device="fake")
    assert re.search("^kernel '.*' for aten::relu .* could not be loaded on fake:0: OSError: no", caught.value.message)
    assert isinstance(caught.value, OSError)


def test_a_function_that_returns_its_results_on_a_device_that_cannot_take_them():
    with (
        kagent_core.use_plugin(FakeDevice()),
        override("aten::relu", torch.relu, device="fake", name="mine"),
        pytest.raises(KagentError, match="give the function a parameter `out`"),
    ):
        relu(device="fake")
