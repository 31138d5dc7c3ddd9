"""A device plugin as one class: what a device must say, and a default for the rest."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kagent_core.config import Config
from kagent_core.device import ArgumentPacker, CodeGenerator, GraphOptimizer, LaunchConfigDeriver, Runtime
from kagent_core.errors import PluginError
from kagent_core.hooks import hookimpl
from kagent_core.registry import KernelRegistry
from kagent_core.specs import DeviceInfo, KernelDescriptor

if TYPE_CHECKING:
    from kagent_core.codegen.work_items import WorkItemLanguage


class DevicePlugin:
    """The base class of a device plugin; an instance of it is what the entry point names.

    A subclass sets `device_type`, `contract_version` and `runtime`, and defines `devices`. It sets `language` where the
    device compiles a C-like language, and so gets every kernel that kagent can generate; it defines `kernels` where it
    has kernels of its own, which outrank generated ones. The other hooks have defaults that fit most devices.

    The plugin itself is imported whenever devices are listed, so that its module imports neither torch nor a driver.
    What does goes into another module, which `runtime` and `language` name as ``"module:class"``: it is imported when
    a program is first placed on a device.

    Attributes
    ----------
    device_type
        As users write it: ``toy`` in ``toy:0``. Also the entry point's name.
    contract_version
        The contract that the plugin was written for: the number that `kagent_core.device.CONTRACT_VERSION` was then.
    runtime
        The `Runtime` of its devices: a class, which is called with a `DeviceInfo` and the `Config`, or its name. A
        plain function here would be a method: mark it ``staticmethod``.
    language
        The `kagent_core.codegen.work_items.WorkItemLanguage` of its kernels: a class, or its name. Optional: by default
        no kernel is generated.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core.specs import Device, DeviceInfo, KernelDescriptor
    >>> from kagent_core.testing.fake import FakeRuntime
    >>> def negate(x, out):
    ...     torch.neg(x, out=out)
    >>> class Toy(DevicePlugin):
    ...     device_type = "toy"
    ...     contract_version = 1
    ...     runtime = staticmethod(lambda info, config: FakeRuntime())
    ...     def devices(self, config):
    ...         return [DeviceInfo(Device("toy", 0), "Toy 3000", max_threads_per_block=64)]
    ...     def kernels(self, info, config):
    ...         yield KernelDescriptor("aten::neg", "negate", negate)
    >>> with kagent_core.use_plugin(Toy()):
    ...     kagent_core.run_op("aten::neg", torch.tensor([1.0, -2.0]), device="toy:0")
    tensor([-1.,  2.])
    """

    device_type: str
    contract_version: int
    runtime: str | Callable[[DeviceInfo, Config], Runtime]
    language: str | type[WorkItemLanguage] | None = None

    # -- what a device says

    def devices(self, config: Config) -> Sequence[DeviceInfo]:
        """Return the devices that are there; of one that cannot be used, with `DeviceInfo.reason` saying why.

        Called whenever devices are listed. It must be quick and raise nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say which devices there are")

    def kernels(self, info: DeviceInfo, config: Config) -> Iterable[KernelDescriptor]:
        """Return kernels of the device's own, which outrank generated ones. Optional: by default none."""
        return ()

    def packer(self, info: DeviceInfo, config: Config) -> ArgumentPacker:
        """Return the argument packer. Optional: by default prototypes decide, or a callable gets all arguments."""
        from kagent_core.extract.pack_prototype import PrototypePacker

        return PrototypePacker()

    def deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver:
        """Return the launch-config deriver. Optional: by default `kagent_core.extract.deriver.StandardDeriver`."""
        from kagent_core.extract.deriver import StandardDeriver

        return StandardDeriver()

    def optimizer(self, info: DeviceInfo, config: Config) -> GraphOptimizer | None:
        """Return what rewrites inference graphs for a device. Optional: by default nothing does."""
        return None

    # -- the hooks

    @hookimpl
    def kagent_contract_version(self) -> int:
        """Say which contract the plugin was written for."""
        for name, example in _EXAMPLES.items():
            if not hasattr(self, name):
                raise PluginError(
                    f"device plugin {type(self).__qualname__} has no attribute '{name}'",
                    hint=f"set it in the class: {name} = {example}",
                )
        return self.contract_version

    @hookimpl
    def kagent_devices(self, config: Config) -> Sequence[DeviceInfo]:
        """List the devices."""
        return self.devices(config)

    @hookimpl
    def kagent_kernel_registry(self, info: DeviceInfo, config: Config) -> KernelRegistry | None:
        """Give the device's own kernels."""
        if info.device.type != self.device_type:
            return None
        registry = KernelRegistry(self.device_type)
        for kernel in self.kernels(info, config):
            registry.add(kernel if kernel.origin else replace(kernel, origin=f"the plugin of '{self.device_type}'"))
        return registry

    @hookimpl
    def kagent_argument_packer(self, info: DeviceInfo, config: Config) -> ArgumentPacker | None:
        """Give the packer."""
        return self.packer(info, config) if info.device.type == self.device_type else None

    @hookimpl
    def kagent_launch_config_deriver(self, info: DeviceInfo, config: Config) -> LaunchConfigDeriver | None:
        """Give the deriver."""
        return self.deriver(info, config) if info.device.type == self.device_type else None

    @hookimpl
    def kagent_runtime(self, info: DeviceInfo, config: Config) -> Runtime | None:
        """Open a device."""
        if info.device.type != self.device_type:
            return None
        opened: Runtime = _named(self.runtime, "runtime", self)(info, config)
        return opened

    @hookimpl
    def kagent_graph_optimizer(self, info: DeviceInfo, config: Config) -> GraphOptimizer | None:
        """Give what rewrites inference graphs."""
        return self.optimizer(info, config) if info.device.type == self.device_type else None

    @hookimpl
    def kagent_code_printer(self, info: DeviceInfo, config: Config) -> CodeGenerator | None:
        """Give the code generator, where the device has a language and the config wants generated kernels."""
        if info.device.type != self.device_type or config.generated_kernels == "off":
            return None
        if self.language is None:
            return None
        from kagent_core.codegen.devices import work_item_generator

        return work_item_generator(_named(self.language, "language", self).of(info), config)


_EXAMPLES = {"device_type": '"toy"', "contract_version": "1", "runtime": '"kagent_toy.device:ToyRuntime"'}


def _named(value: Any, attribute: str, plugin: DevicePlugin) -> Any:
    """Return what an attribute of a plugin stands for: itself, or what a text ``module:name`` names."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise PluginError(
            f"{attribute} of device plugin {type(plugin).__qualname__} is '{value}': {error}",
            hint=f"expected 'module:class', such as {_EXAMPLES['runtime']}",
        ) from error
