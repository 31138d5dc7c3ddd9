"""DevicePlugin: what a subclass must say, what it gets without a word, and what it is told when it is wrong."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.config import Config
from kagent_core.device import LaunchConfigDeriver, Runtime, call_kernel
from kagent_core.device_plugin import DevicePlugin
from kagent_core.errors import PluginError
from kagent_core.extract.deriver import StandardDeriver
from kagent_core.extract.pack_prototype import PrototypePacker
from kagent_core.plugins import PluginManager
from kagent_core.registry import KernelRegistry
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig
from kagent_core.testing import call_hook
from kagent_core.testing.compare import check_against_eager

from ..driver_device import DriverLanguage, DriverRuntime

TOY = DeviceInfo(Device("toy", 0), "Toy", max_threads_per_block=8)
OTHER = DeviceInfo(Device("other", 0), "Other")
Opens = Callable[[DeviceInfo, Config], Runtime]
PROVIDERS = (
    "kagent_kernel_registry",
    "kagent_argument_packer",
    "kagent_launch_config_deriver",
    "kagent_runtime",
    "kagent_code_printer",
)


class LateRuntime(Runtime):
    """Runs what was launched when somebody copies out, and not before; has no `synchronize` of its own."""

    def __init__(self, info: DeviceInfo, config: Config) -> None:
        self.info = info
        self.queue: list[Callable[[], Any]] = []
        self.most_queued = 0

    def allocate(self, nbytes: int) -> bytearray:
        return bytearray(b"\xa5" * nbytes)

    def free(self, buffer: bytearray) -> None:
        assert not self.queue, "memory is given back under a launch"

    def copy_in(self, buffer: bytearray, byte_offset: int, data: memoryview) -> None:
        held = bytes(data)
        self.queue.append(lambda: buffer.__setitem__(slice(byte_offset, byte_offset + len(held)), held))

    def copy_out(self, buffer: bytearray, byte_offset: int, data: memoryview) -> None:
        self.most_queued = max(self.most_queued, len(self.queue))
        while self.queue:
            self.queue.pop(0)()
        data.cast("B")[:] = buffer[byte_offset : byte_offset + data.nbytes]

    def load(self, kernel: KernelDescriptor) -> Any:
        return kernel.function

    def launch(self, kernel: Any, config: LaunchConfig, args: Sequence[Any]) -> None:
        self.queue.append(lambda: call_kernel(kernel, args, self._tensor))

    def _tensor(self, arg: Any) -> Any:
        if not hasattr(arg, "spec"):
            return arg
        count = arg.spec.span
        flat = torch.frombuffer(arg.buffer, dtype=torch.float32, count=count, offset=arg.byte_offset)
        return flat.as_strided(arg.spec.shape, arg.spec.strides)


def negate(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.neg(x, out=out)


class Toy(DevicePlugin):
    """The least that a plugin says, and one kernel."""

    device_type = "toy"
    contract_version = 1
    runtime: str | Opens = LateRuntime

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        return [TOY]

    def kernels(self, info: DeviceInfo, config: Config) -> Sequence[KernelDescriptor]:
        return [KernelDescriptor("aten::neg", "toy_neg", negate)]


class Bare(DevicePlugin):
    """Nothing but what has no default."""

    device_type = "toy"
    contract_version = 1
    runtime: str | Opens = LateRuntime

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        return [TOY]


def provided(plugin: object, hook: str, info: DeviceInfo = TOY, **config: Any) -> Any:
    return call_hook(plugin, hook, info=info, config=kagent_core.load_config(config))


# -- attributes


@pytest.mark.parametrize("name", ["device_type", "contract_version", "runtime"])
def test_an_attribute_that_is_missing_is_named_with_an_example(name: str) -> None:
    body = {key: value for key, value in vars(Bare).items() if key != name}
    plugin = type("Forgetful", (DevicePlugin,), body)()
    with pytest.raises(PluginError, match=f"Forgetful has no attribute '{name}'") as error:
        call_hook(plugin, "kagent_contract_version")
    assert f"{name} = " in (error.value.hint or "")


def test_a_plugin_with_a_missing_attribute_is_refused() -> None:
    class NoVersion(DevicePlugin):
        device_type = "toy"
        runtime = LateRuntime

        def devices(self, config: Config) -> Sequence[DeviceInfo]:
            return [TOY]

    wanted = pytest.raises(PluginError, match="has no attribute 'contract_version'")
    with kagent_core.use_plugin(NoVersion()), wanted:
        kagent_core.run_op("aten::neg", torch.ones(2), device="toy:0")


def test_another_contract_version_is_refused() -> None:
    class Future(Bare):
        contract_version = 99

    with kagent_core.use_plugin(Future()), pytest.raises(PluginError, match="99"):
        kagent_core.run_op("aten::neg", torch.ones(2), device="toy:0")


def test_devices_must_be_said() -> None:
    class Silent(DevicePlugin):
        device_type = "toy"
        contract_version = 1
        runtime = LateRuntime

    with pytest.raises(NotImplementedError, match="Silent does not say which devices there are"):
        call_hook(Silent(), "kagent_devices", config=kagent_core.load_config())


# -- what is named by text


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that holds a runtime and a language, and that nobody has imported."""
    name = "toy_parts_for_a_test"
    text = f"from {__name__} import LateRuntime\nfrom {WorkItemLanguage.__module__} import WorkItemLanguage\n"
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[LateRuntime.__module__])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_what_is_named_is_imported_when_the_device_is_opened(module: str) -> None:
    class Named(Toy):
        runtime = f"{module}:LateRuntime"
        language = f"{module}:WorkItemLanguage"

    plugin = Named()
    call_hook(plugin, "kagent_contract_version")
    assert call_hook(plugin, "kagent_devices", config=kagent_core.load_config()) == [[TOY]]
    for hook in PROVIDERS[:3]:
        assert provided(plugin, hook) is not None
    assert module not in sys.modules
    assert isinstance(provided(plugin, "kagent_runtime"), LateRuntime)
    assert module in sys.modules
    assert provided(plugin, "kagent_code_printer") is not None


@pytest.mark.parametrize(("attribute", "hook"), [("runtime", PROVIDERS[3]), ("language", PROVIDERS[4])])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no_such_module:Toy", "No module named 'no_such_module'"),
        ("kagent_core.device:Toy", "has no attribute 'Toy'"),
        ("kagent_core.device", "kagent_core.device"),
        (":Toy", "Empty module name"),
        (".device:Toy", "relative import"),
        ("", "Empty module name"),
    ],
)
def test_a_name_that_is_wrong_is_told(attribute: str, hook: str, text: str, why: str) -> None:
    plugin = type("Wrong", (Bare,), {attribute: text})()
    with pytest.raises(PluginError) as error:
        provided(plugin, hook)
    assert f"{attribute} of device plugin Wrong is '{text}'" in error.value.message
    assert why in error.value.message
    assert "expected 'module:class'" in (error.value.hint or "")


# -- defaults


def test_what_a_device_gets_without_a_word() -> None:
    plugin = Bare()
    registry = provided(plugin, "kagent_kernel_registry")
    assert isinstance(registry, KernelRegistry)
    assert registry.signatures() == []
    assert type(provided(plugin, "kagent_argument_packer")) is PrototypePacker
    assert type(provided(plugin, "kagent_launch_config_deriver")) is StandardDeriver
    assert provided(plugin, "kagent_code_printer") is None


def test_what_a_device_says_itself_is_taken() -> None:
    class OwnPacker(PrototypePacker):
        pass

    class OwnDeriver(StandardDeriver):
        pass

    class Own(Toy):
        language = WorkItemLanguage

        def packer(self, info: DeviceInfo, config: Config) -> PrototypePacker:
            return OwnPacker()

        def deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver:
            return OwnDeriver()

    assert provided(Own(), "kagent_kernel_registry").signatures() == ["aten::neg"]
    assert isinstance(provided(Own(), "kagent_argument_packer"), OwnPacker)
    assert isinstance(provided(Own(), "kagent_launch_config_deriver"), OwnDeriver)
    assert provided(Own(), "kagent_code_printer") is not None
    assert provided(Own(), "kagent_code_printer", generated_kernels="off") is None


@pytest.mark.parametrize("hook", PROVIDERS)
def test_other_plugins_devices_are_left_alone(hook: str) -> None:
    class Own(Toy):
        language = WorkItemLanguage

    assert provided(Own(), hook, info=OTHER) is None


def test_each_device_is_opened_with_its_info_and_the_config() -> None:
    class Two(Bare):
        def devices(self, config: Config) -> Sequence[DeviceInfo]:
            return [DeviceInfo(Device("toy", index), f"Toy {index}") for index in range(2)]

    manager = PluginManager(kagent_core.load_config(), [("two", Two())])
    opened = [manager.open(manager.resolve(f"toy:{index}")) for index in range(2)]
    assert [device.runtime.info.name for device in opened] == ["Toy 0", "Toy 1"]  # type: ignore[attr-defined]
    manager.close()


# -- running


def test_a_device_with_one_kernel_runs_a_model() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    with kagent_core.use_plugin(Toy()):
        check_against_eager(lambda x, w: (torch.relu(-(x @ w)), -x), x, weight, device="toy:0")
        reports = kagent_core.session_for(kagent_core.load_config({"device": "toy:0"})).reports
    elsewhere = {fallback.signature for report in reports for fallback in report.fallbacks}
    assert elsewhere == {"aten::mm", "aten::relu"}


def test_the_default_synchronize_waits_for_all_that_was_launched() -> None:
    runtime = LateRuntime(TOY, kagent_core.load_config())
    buffer = runtime.allocate(4)
    runtime.copy_in(buffer, 0, memoryview(struct.pack("f", 1.5)))
    assert struct.unpack("f", buffer) != (1.5,)
    for _ in range(2):  # the byte that it copies out is allocated once
        runtime.synchronize()
        assert struct.unpack("f", buffer) == (1.5,)
    assert runtime.queue == []


def test_a_device_that_waits_in_copy_out_alone_is_right_without_synchronize() -> None:
    runtime = LateRuntime(TOY, kagent_core.load_config())

    class Late(Toy):
        def __init__(self) -> None:
            self.runtime = lambda info, config: runtime

    x = torch.randn(5, 7)
    with kagent_core.use_plugin(Late()):
        check_against_eager(lambda x: torch.exp(torch.neg(torch.neg(torch.neg(x)))), x, device="toy:0", calls=3)
    assert runtime.most_queued > 3  # the launches did wait for somebody


def test_a_language_alone_runs_whole_programs() -> None:
    class Compiling(Bare):
        runtime = DriverRuntime
        language = DriverLanguage

    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.nn.functional.gelu(x @ w)
        return hidden.softmax(-1), hidden.t()[1:], hidden.sum()

    with kagent_core.use_plugin(Compiling()):
        for rows in (1, 6):
            check_against_eager(program, torch.randn(rows, 4), torch.randn(4, 4), device="toy:0", every_stride=False)
        reports = kagent_core.session_for(kagent_core.load_config({"device": "toy:0"})).reports
        assert [report.fallbacks for report in reports] == [()] * len(reports)
        assert reports
