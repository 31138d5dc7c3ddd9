"""The plugin manager: finding, loading, choosing and opening, with plugins that misbehave in every way."""

import logging
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from kagent_core import hookspecs
from kagent_core.config import Config
from kagent_core.device import CONTRACT_VERSION, ArgumentPacker, LaunchConfigDeriver, Runtime
from kagent_core.errors import DeviceError, PluginConflictError, PluginError, RegistryError
from kagent_core.hooks import hookimpl
from kagent_core.plugins import (
    DEVICE_GROUP,
    PROGRAM_GROUP,
    STAGE_GROUP,
    PluginManager,
    PluginState,
    installed_entry_points,
)
from kagent_core.registry import KernelRegistry
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig


class ToyRuntime(Runtime):
    closed = 0

    def allocate(self, nbytes):
        return bytearray(nbytes)

    def free(self, buffer):
        pass

    def copy_in(self, buffer, byte_offset, data):
        buffer[byte_offset : byte_offset + len(data)] = data

    def copy_out(self, buffer, byte_offset, data):
        data[:] = buffer[byte_offset : byte_offset + len(data)]

    def load(self, kernel):
        return kernel.function

    def launch(self, kernel, config, args):
        return kernel(*args)

    def synchronize(self):
        pass

    def close(self):
        self.closed += 1


class ToyPacker(ArgumentPacker):
    def pack(self, call, kernel):
        return ()


class ToyDeriver(LaunchConfigDeriver):
    def derive(self, calls, kernel, info):
        return LaunchConfig()


class Toy:
    """A device plugin that works."""

    version = CONTRACT_VERSION

    def __init__(self, device_type="toy", infos=None):
        self.type = device_type
        self.infos = [DeviceInfo(Device(device_type, 0), "Toy 3000")] if infos is None else infos
        self.asked = []

    def give(self, what, info, value):
        if info.device.type != self.type:
            return None
        self.asked.append(what)
        return value

    @hookimpl
    def kagent_contract_version(self):
        return self.version

    @hookimpl
    def kagent_devices(self, config):
        self.asked.append("devices")
        return self.infos

    @hookimpl
    def kagent_kernel_registry(self, info, config):
        return self.give("registry", info, KernelRegistry(self.type))

    @hookimpl
    def kagent_argument_packer(self, info, config):
        return self.give("packer", info, ToyPacker())

    @hookimpl
    def kagent_launch_config_deriver(self, info, config):
        return self.give("deriver", info, ToyDeriver())

    @hookimpl
    def kagent_runtime(self, info, config):
        return self.give("runtime", info, ToyRuntime())


def of_version(version):
    plugin = Toy()
    plugin.version = version
    return plugin


class Point:
    """An entry point. `plugin` is what it loads, or the exception that its import raises."""

    def __init__(self, name, plugin, dist="toy-dist", value=None):
        self.name = name
        self.value = value or f"{name}_module"
        self.dist = SimpleNamespace(name=dist, version="1.0") if dist else None
        self.plugin = plugin
        self.loads = 0

    def load(self):
        self.loads += 1
        if isinstance(self.plugin, BaseException):
            raise self.plugin
        return self.plugin


def manager_of(*points, stages=(), config=None, extra=()):
    groups = {DEVICE_GROUP: points, STAGE_GROUP: stages}
    return PluginManager(config or Config(), extra, groups.__getitem__)


def entry_of(manager, name, group=DEVICE_GROUP):
    [entry] = [entry for entry in manager.entries() if (entry.group, entry.name) == (group, name)]
    return entry


def info_of(text, **changes):
    return DeviceInfo(Device.parse(text), text.title(), **changes)


# -- listing


def test_listing_imports_nothing_so_that_a_broken_plugin_stays_listed():
    broken, fine, stage = (
        Point("broken", ImportError("no driver")),
        Point("toy", Toy()),
        Point("watch", Toy()),
    )
    manager = manager_of(broken, fine, stages=[stage])
    assert [(e.group, e.name, e.state) for e in manager.entries()] == [
        (DEVICE_GROUP, "broken", PluginState.LISTED),
        (DEVICE_GROUP, "toy", PluginState.LISTED),
        (STAGE_GROUP, "watch", PluginState.LISTED),
    ]
    assert manager.device_types() == ["broken", "toy"]
    assert broken.loads == fine.loads == stage.loads == 0
    toy = entry_of(manager, "toy")
    assert (toy.distribution, toy.version, toy.target, toy.reason) == ("toy-dist", "1.0", "toy_module", None)


def test_an_entry_point_without_a_distribution_is_told_by_its_target():
    manager = manager_of(Point("toy", ImportError("gone"), dist=None))
    assert entry_of(manager, "toy").owner == "toy_module"
    with pytest.raises(PluginError, match=r"plugin 'toy' \(toy_module\) cannot be used"):
        manager.resolve("toy")


def test_only_the_wanted_types_plugin_is_imported():
    wanted, other, stage = Point("toy", Toy()), Point("other", Toy("other")), Point("watch", Toy())
    manager = manager_of(wanted, other, stages=[stage])
    assert manager.resolve("toy").device == Device("toy", 0)
    manager.resolve("toy:0")
    assert (wanted.loads, other.loads, stage.loads) == (1, 0, 0)
    assert entry_of(manager, "toy").state is PluginState.LOADED
    assert entry_of(manager, "other").state is PluginState.LISTED
    assert wanted.plugin.asked == ["devices"]


def test_stages_are_imported_when_they_are_wanted_and_once():
    stage = Point("watch", Toy("watch"))
    manager = manager_of(Point("toy", Toy()), stages=[stage])
    manager.load_stages()
    manager.load_stages()
    assert stage.loads == 1
    assert entry_of(manager, "watch", STAGE_GROUP).state is PluginState.LOADED
    assert entry_of(manager, "toy").state is PluginState.LISTED


def test_a_broken_stage_is_an_error_because_programs_would_run_otherwise_without_it():
    manager = manager_of(stages=[Point("watch", ValueError("bad luck"))])
    for _ in range(2):
        with pytest.raises(PluginError, match=r"'watch' \(toy-dist\).*import failed: ValueError: bad luck"):
            manager.load_stages()


def test_one_name_for_a_device_and_a_stage_is_no_conflict():
    device, stage = Point("toy", Toy()), Point("toy", Toy("none"))
    manager = manager_of(device, stages=[stage])
    manager.load_stages()
    assert manager.resolve("toy").device == Device("toy", 0)
    assert [entry.state for entry in manager.entries()] == [PluginState.LOADED] * 2


def test_one_module_can_be_both_and_its_hooks_are_registered_once():
    both = Toy()
    manager = manager_of(Point("toy", both), stages=[Point("toy", both)])
    manager.load_stages()
    manager.resolve("toy")
    assert len(manager.hooks.implementers("kagent_devices")) == 1
    assert [entry.state for entry in manager.entries()] == [PluginState.LOADED] * 2


# -- plugins that cannot be used


@pytest.mark.parametrize("error", [ImportError("no module 'driver'"), RuntimeError("boom"), SystemExit(3)])
def test_a_failing_import_is_data_and_the_others_stay_usable(error):
    broken = Point("broken", error)
    manager = manager_of(broken, Point("toy", Toy()))
    infos = {str(info.device): info for info in manager.devices()}
    assert sorted(infos) == ["broken", "toy:0"]
    assert not infos["broken"].available
    assert infos["broken"].reason == f"import failed: {type(error).__name__}: {error}"
    assert infos["broken"].plugin == "toy-dist"
    assert infos["toy:0"].available
    assert entry_of(manager, "broken").state is PluginState.FAILED
    assert entry_of(manager, "broken").reason == infos["broken"].reason
    assert manager.device_types() == ["toy"]
    with pytest.raises(PluginError, match="import failed"):
        manager.resolve("broken")
    assert manager.resolve("toy").available
    assert broken.loads == 1, "a failed import is not tried again"


def test_an_error_of_the_plugins_own_import_is_the_cause():
    error = ImportError("no driver")
    with pytest.raises(PluginError) as caught:
        manager_of(Point("toy", error)).resolve("toy")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("version", "told", "hint"),
    [
        (
            CONTRACT_VERSION - 1,
            f"version {CONTRACT_VERSION - 1}, and this core has {CONTRACT_VERSION}",
            "the plugin",
        ),
        (
            CONTRACT_VERSION + 1,
            f"version {CONTRACT_VERSION + 1}, and this core has {CONTRACT_VERSION}",
            "kagent-torch",
        ),
        ("one", "version 'one', and this core has", f"must return {CONTRACT_VERSION}"),
        (None, "does not say which contract version", "implement kagent_contract_version"),
    ],
)
def test_another_contract_version_is_refused(version, told, hint):
    manager = manager_of(Point("toy", of_version(version)), Point("other", Toy("other")))
    for _ in range(2):  # the second time, it is known to have failed
        with pytest.raises(PluginError) as caught:
            manager.resolve("toy")
        assert told in caught.value.message
        assert "'toy' (toy-dist)" in caught.value.message
        assert hint in caught.value.hint
    assert entry_of(manager, "toy").state is PluginState.FAILED
    assert "toy" not in manager.hooks.names(), "its hooks must not be called"
    assert manager.resolve("other").available


def test_a_plugin_without_a_contract_version_is_refused():
    class Silent:
        @hookimpl
        def kagent_devices(self, config):
            return [info_of("toy:0")]

    with pytest.raises(PluginError, match="does not say which contract version"):
        manager_of(Point("toy", Silent())).resolve("toy")


def test_a_contract_version_that_raises_is_data():
    class Raises:
        @hookimpl
        def kagent_contract_version(self):
            raise OSError("disk gone")

    [info] = manager_of(Point("toy", Raises())).devices()
    assert info.reason == "kagent_contract_version failed: OSError: disk gone"


def test_a_plugin_that_does_not_fit_the_hooks_is_data():
    class Misspelt(Toy):
        @hookimpl
        def kagent_argument_paker(self, info, config):
            return None

    manager = manager_of(Point("toy", Misspelt()), Point("other", Toy("other")))
    bad, good = sorted(manager.devices(), key=lambda info: info.available)
    assert "implements 'kagent_argument_paker', which is not one of kagent's hooks" in bad.reason
    assert good.device == Device("other", 0)
    with pytest.raises(PluginError, match="did you mean 'kagent_argument_packer'"):
        manager.resolve("toy")


def raising(_config):
    raise RuntimeError("probe crashed")


def generating(_config):
    yield info_of("toy:0")
    raise RuntimeError("probe crashed late")


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        (raising, "listing its devices failed: RuntimeError: probe crashed"),
        (generating, "listing its devices failed: RuntimeError: probe crashed late"),
        (lambda config: ["toy:0"], "kagent_devices gave 'toy:0', expected a list of DeviceInfo"),
        (lambda config: 3, "kagent_devices gave 3, expected a list of DeviceInfo"),
    ],
)
def test_devices_never_raises_whatever_a_probe_does(probe, told):
    class Broken(Toy):
        @hookimpl
        def kagent_devices(self, config):
            return probe(config)

    manager = manager_of(Point("toy", Broken()), Point("other", Toy("other")))
    infos = {info.device.type: info for info in manager.devices()}
    assert infos["toy"].reason.startswith(told)
    assert infos["other"].available
    assert entry_of(manager, "toy").state is PluginState.FAILED
    assert "toy" not in manager.hooks.names()


def test_a_device_plugin_must_list_devices():
    class NoDevices:
        @hookimpl
        def kagent_contract_version(self):
            return CONTRACT_VERSION

    with pytest.raises(PluginError, match="does not implement kagent_devices"):
        manager_of(Point("toy", NoDevices())).resolve("toy")


def test_a_device_of_another_type_than_the_entry_point_is_refused():
    manager = manager_of(Point("toy", Toy(infos=[info_of("toy:0"), info_of("gadget:0")])))
    with pytest.raises(PluginError, match="device of type 'gadget', but its entry point is named 'toy'"):
        manager.resolve("toy")
    assert entry_of(manager, "toy").state is PluginState.FAILED


# -- two plugins that claim the same


def test_two_distributions_with_one_entry_point_name_are_a_conflict_that_names_both():
    one, two = Point("toy", Toy(), "dist-a", "a.plugin"), Point("toy", Toy(), "dist-b", "b.plugin")
    manager = manager_of(one, two, Point("other", Toy("other")))
    entry = entry_of(manager, "toy")
    assert entry.state is PluginState.CONFLICT
    with pytest.raises(PluginConflictError) as caught:
        manager.resolve("toy")
    for told in (entry.reason, caught.value.message):
        assert "'dist-a' (a.plugin) and 'dist-b' (b.plugin)" in told
    assert "uninstall" in caught.value.hint
    assert one.loads == two.loads == 0
    assert manager.resolve("other").available
    assert [info.available for info in manager.devices()] == [True, False]


def test_a_conflict_names_everyone_and_the_same_entry_point_twice_is_none():
    points = [Point("toy", Toy(), dist, f"{dist}.plugin") for dist in ("a", "b", "a", "c")]
    assert all(f"'{d}' ({d}.plugin)" in entry_of(manager_of(*points), "toy").reason for d in "abc")
    twice = manager_of(points[0], points[2])
    assert entry_of(twice, "toy").state is PluginState.LISTED


def test_a_conflict_of_stages_is_an_error_too():
    stages = [Point("watch", Toy(), "dist-a"), Point("watch", Toy(), "dist-b")]
    with pytest.raises(PluginConflictError, match=r"'dist-a'.*'dist-b'"):
        manager_of(stages=stages).load_stages()


def test_a_device_of_another_plugins_type_is_a_conflict_that_names_both():
    thief = Point("thief", Toy(infos=[info_of("toy:0")]), "thief-dist")
    manager = manager_of(Point("toy", Toy()), thief)
    with pytest.raises(PluginConflictError, match=r"'thief' \(thief-dist\).*type 'toy', which 'toy-dist'"):
        manager.resolve("thief")
    assert entry_of(manager, "thief").state is PluginState.CONFLICT
    assert manager.resolve("toy").plugin == "toy-dist"


def test_a_program_and_an_installed_plugin_that_claim_one_type_are_a_conflict():
    installed = Point("toy", Toy())
    with pytest.raises(PluginConflictError, match=r"type 'toy': 'mine'.*and 'toy-dist'") as caught:
        manager_of(installed, extra=[("mine", Toy())])
    assert "plugins_block = ['toy']" in caught.value.hint
    manager = manager_of(installed, extra=[("mine", Toy())], config=Config(plugins_block="toy"))
    assert manager.resolve("toy").plugin == "Toy"
    assert installed.loads == 0


def test_a_program_plugin_cannot_have_an_installed_plugins_name():
    with pytest.raises(PluginConflictError, match=r"two plugins are named 'toy'.*'toy-dist'"):
        manager_of(Point("toy", Toy()), extra=[("toy", Toy("mine"))])


def test_two_program_plugins_that_claim_one_type_are_a_conflict_that_names_both():
    with pytest.raises(PluginConflictError, match="type 'toy': 'one' and 'two'"):
        manager_of(extra=[("one", Toy()), ("two", Toy())])


# -- plugins of the program


def test_a_program_plugins_devices_are_listed_whatever_its_name():
    manager = manager_of(Point("toy", Toy()), extra=[("mine", Toy("gadget"))])
    assert [str(info.device) for info in manager.devices()] == ["gadget:0", "toy:0"]
    assert manager.device_types() == ["gadget", "toy"]
    assert manager.resolve("gadget").plugin == "Toy"
    entry = entry_of(manager, "mine", PROGRAM_GROUP)
    assert (entry.state, entry.target) == (PluginState.LOADED, "Toy")


def test_a_program_plugin_without_devices_is_no_device():
    class Watch:
        @hookimpl
        def kagent_task_finished(self, event):
            pass

    manager = manager_of(Point("toy", Toy()), extra=[("watch", Watch())])
    assert [str(info.device) for info in manager.devices()] == ["toy:0"]
    assert manager.device_types() == ["toy"]
    assert manager.hooks.implementers("kagent_task_finished") == ["watch"]


def test_a_program_plugin_with_devices_needs_the_contract_version():
    with pytest.raises(PluginError, match="contract version 7"):
        manager_of(extra=[("mine", of_version(7))])


# -- allowing and blocking


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Config(plugins_block="toy"), "plugins_block names it"),
        (Config(plugins_allow="other"), "plugins_allow does not name it"),
    ],
)
def test_a_blocked_plugin_is_not_imported_and_says_why(config, told):
    points = Point("toy", Toy()), Point("other", Toy("other"))
    manager = manager_of(*points, config=config)
    assert entry_of(manager, "toy").state is PluginState.BLOCKED
    assert manager.device_types() == ["other"]
    with pytest.raises(PluginError, match=f"'toy'.*{told}"):
        manager.resolve("toy")
    assert [(info.device.type, info.available) for info in manager.devices()] == [
        ("other", True),
        ("toy", False),
    ]
    assert told in manager.devices()[1].reason
    assert points[0].loads == 0


def test_a_blocked_stage_is_left_out():
    stage = Point("watch", ImportError("never seen"))
    manager = manager_of(stages=[stage], config=Config(plugins_block="watch"))
    manager.load_stages()
    assert stage.loads == 0


def test_blocking_settles_a_conflict():
    manager = manager_of(Point("toy", Toy(), "a"), Point("toy", Toy(), "b"), config=Config(plugins_block="toy"))
    assert entry_of(manager, "toy").state is PluginState.BLOCKED


# -- choosing a device


def auto(*infos, fallback=True):
    """Resolve ``auto`` among plugins with these devices, one for each type."""
    by_type = {}
    for info in infos:
        by_type.setdefault(info.device.type, []).append(info)
    points = [Point(name, Toy(name, given)) for name, given in by_type.items()]
    if fallback:
        points.append(Point("cpu", Toy("cpu", [DeviceInfo(Device("cpu"), "host")])))
    return str(manager_of(*points).resolve("auto").device)


def test_auto_prefers_a_usable_device_that_is_not_the_fallback():
    assert auto(info_of("toy:0")) == "toy:0"
    assert auto(info_of("toy:0", reason="unplugged"), info_of("toy:1")) == "toy:1"
    assert auto(info_of("zebra:0"), info_of("toy:0", reason="unplugged")) == "zebra:0"


def test_auto_never_picks_an_emulated_device():
    assert auto(info_of("toy:0", emulated=True)) == "cpu"
    assert auto(info_of("toy:0", emulated=True), info_of("toy:1")) == "toy:1"


def test_auto_falls_back_and_logs_why(caplog):
    with caplog.at_level(logging.INFO, "kagent.plugins"):
        assert auto(info_of("toy:0", reason="no driver found")) == "cpu"
    assert "toy:0 is left out: no driver found" in caplog.text
    assert "chose the fallback device cpu" in caplog.text


def test_auto_passes_over_a_broken_plugin():
    broken = Point("broken", ImportError("gone"))
    manager = manager_of(broken, Point("cpu", Toy("cpu", [DeviceInfo(Device("cpu"), "host")])))
    assert manager.resolve("auto").device == Device("cpu")
    assert broken.loads == 1


def test_auto_uses_the_configs_fallback_device():
    infos = [info_of("toy:0"), info_of("toy:1")]
    manager = manager_of(Point("toy", Toy(infos=infos)), config=Config(fallback_device="toy:1"))
    assert manager.resolve("auto").device == Device("toy", 1)


def test_a_type_is_its_first_usable_device_and_emulated_ones_come_last():
    infos = [info_of("toy:0", reason="unplugged"), info_of("toy:1", emulated=True), info_of("toy:2")]
    manager = manager_of(Point("toy", Toy(infos=infos)))
    assert manager.resolve("toy").device == Device("toy", 2)
    assert manager.resolve("toy:1").device == Device("toy", 1)
    only = manager_of(Point("toy", Toy(infos=infos[:2])))
    assert only.resolve("toy").device == Device("toy", 1)


def test_the_only_device_of_a_type_is_also_number_zero():
    manager = manager_of(Point("toy", Toy(infos=[DeviceInfo(Device("toy"), "Toy")])))
    assert manager.resolve("toy:0").device == Device("toy")
    with pytest.raises(DeviceError, match="no device 'toy:1'; 'toy' has 'toy'"):
        manager.resolve("toy:1")


def test_a_wrong_index_says_which_there_are():
    manager = manager_of(Point("toy", Toy(infos=[info_of("toy:0"), info_of("toy:3")])))
    with pytest.raises(DeviceError, match="no device 'toy:1'; 'toy' has 'toy:0' or 'toy:3'"):
        manager.resolve("toy:1")


def test_a_device_that_is_not_available_says_why():
    manager = manager_of(Point("toy", Toy(infos=[info_of("toy:0", reason="no driver; install toy-driver")])))
    for name in ("toy", "toy:0"):
        with pytest.raises(DeviceError, match=f"'{name}' cannot be used: no driver; install toy-driver"):
            manager.resolve(name)


@pytest.mark.parametrize("found", [[], None])
def test_a_plugin_that_finds_no_device_is_named(found):
    plugin = Toy()
    plugin.infos = found
    manager = manager_of(Point("toy", plugin))
    with pytest.raises(DeviceError, match="no device 'toy': the plugin 'toy-dist' finds none here"):
        manager.resolve("toy")
    assert manager.devices() == []


def test_an_unknown_type_says_the_nearest():
    manager = manager_of(Point("opencl", Toy("opencl")), Point("toy", Toy()))
    with pytest.raises(DeviceError, match="brings the device type 'opencil'; there is 'opencl' or 'toy'") as e:
        manager.resolve("opencil:0")
    assert "did you mean 'opencl'?" in e.value.hint


def test_an_unknown_type_says_what_is_installed_but_cannot_be_used():
    manager = manager_of(Point("toy", ImportError("gone")))
    manager.devices()
    with pytest.raises(DeviceError) as caught:
        manager.resolve("gadget")
    assert "there is none; 'toy' cannot be used: import failed: ImportError: gone" in caught.value.message
    assert "no device plugin is installed" not in caught.value.message


@pytest.mark.parametrize("name", ["auto", "cpu", "toy:1"])
def test_no_plugin_at_all_says_how_to_get_one(name):
    with pytest.raises(DeviceError, match="no device plugin is installed") as caught:
        manager_of().resolve(name)
    assert "pip install kagent-cpu" in caught.value.hint


def test_many_threads_that_want_a_device_import_and_open_it_once():
    class Slow(Toy):
        @hookimpl
        def kagent_devices(self, config):
            time.sleep(0.05)
            return super().kagent_devices(config)

    point = Point("toy", Slow())
    manager = manager_of(point)
    with ThreadPoolExecutor(8) as pool:
        opened = set(pool.map(lambda _: id(manager.open(manager.resolve("toy"))), range(8)))
    assert len(opened) == 1
    assert point.loads == 1
    assert point.plugin.asked.count("devices") == point.plugin.asked.count("runtime") == 1


def test_text_that_is_no_device_name_is_refused():
    with pytest.raises(DeviceError, match="'toy:x' is not a device name"):
        manager_of(Point("toy", Toy())).resolve("toy:x")


# -- opening


def test_a_device_is_opened_once_with_everything_that_its_plugin_gives():
    plugin = Toy()
    manager = manager_of(Point("toy", plugin), Point("other", Toy("other")))
    manager.devices()
    opened = manager.open(manager.resolve("toy"))
    assert manager.open(manager.resolve("toy:0")) is opened
    asked = ["deriver", "devices", "packer", "registry", "runtime"]
    assert sorted(plugin.asked) == asked
    assert isinstance(opened.runtime, ToyRuntime)
    assert isinstance(opened.packer, ToyPacker)
    assert isinstance(opened.deriver, ToyDeriver)
    assert opened.printer is None
    assert opened.device == Device("toy", 0)
    with pytest.raises(RegistryError, match="frozen"):
        opened.registry.add(KernelDescriptor("aten::relu", "late"))


def test_close_closes_every_device_even_when_one_fails(caplog):
    class Stuck(Toy):
        @hookimpl
        def kagent_runtime(self, info, config):
            if info.device.type == "stuck":
                runtime = ToyRuntime()
                runtime.close = lambda: 1 / 0
                return runtime
            return None

    manager = manager_of(Point("stuck", Stuck("stuck")), Point("toy", Toy()))
    manager.open(manager.resolve("stuck"))
    opened = manager.open(manager.resolve("toy"))
    manager.close()
    assert opened.runtime.closed == 1
    assert "closing stuck:0 failed: ZeroDivisionError" in caplog.text
    manager.close()
    assert opened.runtime.closed == 1, "it is no longer open"
    assert manager.open(manager.resolve("toy")) is not opened


PROVIDERS = (
    "kagent_kernel_registry",
    "kagent_argument_packer",
    "kagent_launch_config_deriver",
    "kagent_runtime",
)


def with_provider(hook, provider):
    function = hookimpl(specname=hook)(lambda self, info, config: provider())
    return type("Partial", (Toy,), {hook: function})()


@pytest.mark.parametrize("hook", PROVIDERS)
def test_a_missing_provider_is_named(hook):
    manager = manager_of(Point("toy", with_provider(hook, lambda: None)))
    with pytest.raises(PluginError, match=f"no plugin gives {hook} for 'toy:0'") as caught:
        manager.open(manager.resolve("toy"))
    assert "'toy-dist'" in caught.value.hint


@pytest.mark.parametrize("hook", PROVIDERS)
def test_a_provider_that_gives_something_else_is_named(hook):
    manager = manager_of(Point("toy", with_provider(hook, lambda: "something")))
    with pytest.raises(PluginError, match=f"{hook} gave 'something' for 'toy:0', which is no"):
        manager.open(manager.resolve("toy"))


@pytest.mark.parametrize("hook", [*PROVIDERS, "kagent_code_printer", "kagent_graph_optimizer"])
def test_a_provider_that_raises_is_named_and_opens_nothing(hook):
    plugin = with_provider(hook, lambda: {}["driver"])
    manager = manager_of(Point("toy", plugin))
    with pytest.raises(DeviceError, match=f"'toy:0' cannot be opened: {hook} failed with KeyError: 'driver'") as e:
        manager.open(manager.resolve("toy"))
    assert isinstance(e.value.__cause__, KeyError)
    assert "runtime" not in plugin.asked, "a runtime was opened that nobody can close"


def test_a_providers_own_kagent_error_is_passed_on():
    def refuse():
        raise DeviceError("device 'toy:0' is in use by another program", hint="end it")

    manager = manager_of(Point("toy", with_provider("kagent_runtime", refuse)))
    with pytest.raises(DeviceError, match="in use by another program") as caught:
        manager.open(manager.resolve("toy"))
    assert caught.value.hint == "end it"


def test_every_provider_hook_is_covered():
    returning = {name for name in dir(hookspecs) if name.startswith("kagent_")}
    stages = {
        "validate",
        "analyze_fusion",
        "lookup_kernels",
        "pack_arguments",
        "derive_launch_configs",
        "assemble",
    }
    optional = {"code_printer", "graph_optimizer"}
    others = {"contract_version", "devices", "place", "task_finished", *optional, *stages}
    assert returning - {f"kagent_{name}" for name in others} == set(PROVIDERS)


# -- installed distributions

PLUGIN = """
from kagent_core.hooks import hookimpl
from kagent_core.specs import Device, DeviceInfo

@hookimpl
def kagent_contract_version():
    return 1

@hookimpl
def kagent_devices(config):
    return [DeviceInfo(Device({type!r}, 0), "a device on disk")]
"""


def install(directory, distribution, points, modules):
    """Put a distribution with entry points into a directory, as pip would."""
    metadata = directory / f"{distribution}-2.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.5\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{DEVICE_GROUP}]", *lines, ""]))
    for name, source in modules.items():
        (directory / f"{name}.py").write_text(source)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An installation of three distributions, two of which bring a plugin of the same name."""
    install(
        tmp_path,
        "disk_alpha",
        {"disk": "alpha_plugin", "shared": "alpha_plugin", "wreck": "wreck_plugin"},
        {"alpha_plugin": PLUGIN.format(type="disk"), "wreck_plugin": "raise RuntimeError('imported')"},
    )
    install(tmp_path, "disk_beta", {"shared": "beta_plugin"}, {"beta_plugin": PLUGIN.format(type="shared")})
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("alpha_plugin", "beta_plugin", "wreck_plugin"):
        sys.modules.pop(name, None)


def test_installed_plugins_are_found_loaded_and_compared(site):
    manager = PluginManager(Config(), entry_points=installed_entry_points)
    entry = entry_of(manager, "disk")
    assert (entry.distribution, entry.version, entry.target) == ("disk_alpha", "2.5", "alpha_plugin")
    assert "alpha_plugin" not in sys.modules
    assert manager.resolve("disk").name == "a device on disk"
    assert manager.resolve("disk").plugin == "disk_alpha"
    assert "wreck_plugin" not in sys.modules
    shared = entry_of(manager, "shared")
    assert shared.state is PluginState.CONFLICT
    assert "'disk_alpha' (alpha_plugin)" in shared.reason
    assert "'disk_beta' (beta_plugin)" in shared.reason
    with pytest.raises(PluginError, match="import failed: RuntimeError: imported"):
        manager.resolve("wreck")


def test_a_distribution_with_incomplete_metadata_is_listed_all_the_same(site):
    (site / "disk_alpha-2.5.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: disk_alpha\n")
    (site / "disk_beta-2.5.dist-info" / "METADATA").unlink()
    manager = PluginManager(Config())
    assert (entry_of(manager, "disk").distribution, entry_of(manager, "disk").version) == ("disk_alpha", "")
    assert "'beta_plugin' (beta_plugin)" in entry_of(manager, "shared").reason


def test_listing_in_a_fresh_interpreter_imports_neither_plugins_nor_torch(site):
    program = """
        import sys
        from kagent_core.config import Config
        from kagent_core.plugins import PluginManager
        names = [entry.name for entry in PluginManager(Config()).entries()]
        assert {"disk", "shared", "wreck"} <= set(names), names
        unwanted = {"torch", "alpha_plugin", "beta_plugin", "wreck_plugin", "kagent_cpu"} & set(sys.modules)
        print("imported:", sorted(unwanted))
    """
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported: []"
