"""Registering plugins on hooks: what pluggy would swallow is an error here."""

import dataclasses
import types

import pytest

from kagent_core import hookspecs
from kagent_core.config import Config
from kagent_core.errors import PluginConflictError, PluginError
from kagent_core.hooks import Hooks, hookimpl
from kagent_core.specs import Device, DeviceInfo

INFO = DeviceInfo(Device("toy", 0), "Toy")


@pytest.fixture
def hooks():
    return Hooks(hookspecs)


class Versioned:
    """A plugin that says a number as its contract version."""

    def __init__(self, version=1):
        self.version = version

    @hookimpl
    def kagent_contract_version(self):
        return self.version


def printer(result):
    """A plugin that gives `result` as a device's code printer."""

    class Printer:
        @hookimpl
        def kagent_code_printer(self, info):
            return result

    return Printer()


def test_plugins_are_called_last_registered_first(hooks):
    hooks.register(Versioned(1), "first")
    hooks.register(Versioned(2), "second")
    assert hooks.call.kagent_contract_version() == [2, 1]
    assert hooks.implementers("kagent_contract_version") == ["second", "first"]
    assert list(hooks.names()) == ["first", "second"]


def test_the_first_result_wins_and_none_declines(hooks):
    for name, result in (("plain", "plain"), ("fancy", "fancy"), ("declines", None)):
        hooks.register(printer(result), name)
    assert hooks.call.kagent_code_printer(info=INFO, config=Config()) == "fancy"


def test_a_wrapper_sees_the_result(hooks):
    class Louder:
        @hookimpl(wrapper=True)
        def kagent_code_printer(self, info):
            result = yield
            return result.upper()

    hooks.register(Louder(), "louder")
    hooks.register(printer("plain"), "plain")
    assert hooks.call.kagent_code_printer(info=INFO, config=Config()) == "PLAIN"


def test_unregister_takes_every_hook_away(hooks):
    hooks.register(Versioned(1), "first")
    hooks.register(Versioned(2), "second")
    hooks.unregister("first")
    assert hooks.call.kagent_contract_version() == [2]
    assert list(hooks.names()) == ["second"]


def test_a_module_can_be_a_plugin(hooks):
    module = types.ModuleType("toy_plugin")
    exec(
        "from kagent_core.hooks import hookimpl\n@hookimpl\ndef kagent_contract_version():\n    return 5\n",
        module.__dict__,
    )
    hooks.register(module, "toy")
    assert hooks.call.kagent_contract_version() == [5]


# -- what is refused


def test_an_unknown_hook_is_refused_with_the_nearest_one(hooks):
    class Misspelt(Versioned):
        @hookimpl
        def kagent_devises(self, config):
            return []

    with pytest.raises(PluginError) as caught:
        hooks.register(Misspelt(), "toy")
    assert "plugin 'toy' implements 'kagent_devises'" in caught.value.message
    assert caught.value.hint == "did you mean 'kagent_devices'?"
    assert hooks.implementers("kagent_contract_version") == [], "nothing of it may stay registered"
    assert list(hooks.names()) == []


def test_an_unknown_hook_that_is_near_to_nothing_lists_all(hooks):
    class Odd:
        @hookimpl
        def zzz(self):
            pass

    with pytest.raises(PluginError) as caught:
        hooks.register(Odd(), "toy")
    assert "'kagent_assemble'" in caught.value.hint
    assert "None" not in caught.value.hint


def test_a_wrong_argument_is_refused(hooks):
    class WrongArgument(Versioned):
        @hookimpl
        def kagent_devices(self, config, verbose):
            return []

    with pytest.raises(PluginError, match=r"plugin 'toy' does not fit kagent's hooks.*kagent_devices.*verbose"):
        hooks.register(WrongArgument(), "toy")
    assert hooks.implementers("kagent_contract_version") == []
    hooks.register(Versioned(), "toy")


def test_a_forgotten_marker_is_refused(hooks):
    class Forgetful(Versioned):
        def kagent_devices(self, config):
            return []

    with pytest.raises(PluginError, match="function kagent_devices that is not marked") as caught:
        hooks.register(Forgetful(), "toy")
    assert "@kagent_core.hookimpl" in caught.value.hint


def test_a_class_in_place_of_an_instance_is_refused(hooks):
    with pytest.raises(PluginError, match="plugin 'toy' is the class Versioned, not a module or an instance") as e:
        hooks.register(Versioned, "toy")
    assert e.value.hint == "give an instance: Versioned()"


def test_none_is_refused(hooks):
    with pytest.raises(PluginError, match="plugin 'toy' is None"):
        hooks.register(None, "toy")


def test_a_taken_name_is_refused_and_its_owner_stays(hooks):
    hooks.register(Versioned(1), "toy")
    with pytest.raises(PluginConflictError, match="two plugins are named 'toy'"):
        hooks.register(Versioned(2), "toy")
    assert hooks.call.kagent_contract_version() == [1]


def test_the_same_plugin_twice_is_refused(hooks):
    plugin = Versioned()
    hooks.register(plugin, "toy")
    assert hooks.name_of(plugin) == "toy"
    assert hooks.name_of(Versioned()) is None
    with pytest.raises(PluginConflictError, match="plugin 'again' is registered already, as 'toy'"):
        hooks.register(plugin, "again")


# -- one plugin only


def test_call_one_calls_one(hooks):
    hooks.register(Versioned(1), "first")
    hooks.register(Versioned(2), "second")
    assert hooks.call_one("kagent_contract_version", "first") == [1]
    assert hooks.call_one("kagent_contract_version", "second") == [2]
    assert hooks.call_one("kagent_contract_version", "nobody") == []
    assert hooks.call_one("kagent_devices", "first", config=Config()) == []


def test_call_one_is_not_wrapped_by_others_and_finds_hooks_under_other_names(hooks):
    class Wrapper:
        @hookimpl(wrapper=True)
        def kagent_contract_version(self):
            yield
            return [99]

    class Renamed:
        @hookimpl(specname="kagent_contract_version")
        def my_version(self):
            return 3

    hooks.register(Wrapper(), "wrapper")
    hooks.register(Renamed(), "renamed")
    hooks.register(Versioned(1), "plain")
    assert hooks.call_one("kagent_contract_version", "renamed") == [3]
    assert hooks.call_one("kagent_contract_version", "plain") == [1]
    assert hooks.call_one("kagent_contract_version", "wrapper") == []


def test_call_one_gives_a_plugin_only_the_arguments_that_it_takes(hooks):
    class Optional:
        @hookimpl
        def kagent_devices(self, config=None, unheard_of=7):
            return [config, unheard_of]

    config = Config()
    hooks.register(printer("plain"), "plain")
    hooks.register(Optional(), "optional")
    assert hooks.call_one("kagent_code_printer", "plain", info=INFO, config=config) == ["plain"]
    assert hooks.call_one("kagent_devices", "optional", config=config) == [[config, 7]]


def test_a_plugin_that_cannot_be_hashed_disturbs_nobody(hooks):
    @dataclasses.dataclass
    class Unhashable:
        number: int

        @hookimpl
        def kagent_contract_version(self):
            return self.number

    hooks.register(Unhashable(4), "unhashable")
    hooks.register(Versioned(1), "plain")
    assert hooks.call_one("kagent_contract_version", "plain") == [1]
    assert hooks.call_one("kagent_contract_version", "unhashable") == [4]
    with pytest.raises(PluginConflictError, match="'twin' equals one that is registered already"):
        hooks.register(Unhashable(4), "twin")
