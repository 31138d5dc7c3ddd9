"""Kernels that a program brings itself, in the place of those that a device's plugin has.

`kernel` registers one for the process, `override` for the length of a ``with`` block. They outrank every kernel of
the plugin, whatever its priority. Nothing of the plugin is touched: a session looks its device's registry up through
the kernels that are active where the program is called.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kagent_core.capture.schemas import resolve_overload
from kagent_core.config import Config
from kagent_core.config.values import as_launch_config
from kagent_core.errors import ConfigError, KagentError, RegistryError
from kagent_core.extract.launch_choice import ForcedLaunchConfig
from kagent_core.inspect.logs import get_logger
from kagent_core.kernel_source import descriptor_fields, marked_source
from kagent_core.registry.acceptance import RESULT_NAME
from kagent_core.registry.operators import check_fields, check_kernel
from kagent_core.registry.origin import calling_line, function_name, line_of
from kagent_core.specs import DEFAULT_SIGNATURE, Access, Device, KernelDescriptor, LaunchConfig, Parameter

log = get_logger("plugins")
_extract_log = get_logger("extract")


class UserKernel:
    """A kernel that a program registered. Calling it calls its function.

    Attributes
    ----------
    device
        Where it is used; without an index, on every device of the type.
    descriptor
        What the registry of such a device holds.
    decorated
        The kernel that the same function is already, where one decorator stands on another.
    """

    def __init__(self, device: Device, descriptor: KernelDescriptor, decorated: UserKernel | None = None) -> None:
        self.device = device
        self.descriptor = descriptor
        self.decorated = decorated
        if descriptor.function is not None:
            functools.update_wrapper(self, descriptor.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        if self.descriptor.function is None:
            decorating = len(args) == 1 and inspect.isfunction(args[0]) and not kwargs
            told = "; a kernel with source= is registered by the call alone, with no function below it"
            raise TypeError(f"{self!r} is source text: only its device can run it{told if decorating else ''}")
        return self.descriptor.function(*args, **kwargs)

    def __repr__(self) -> str:
        kernel = self.descriptor
        return f"<kernel '{kernel.name}' for {kernel.signature} on {self.device}, {kernel.origin}>"

    def is_for(self, device: Device) -> bool:
        """Whether it is used on a device."""
        return self.device.type == device.type and self.device.index in (None, device.index or 0)

    def unregister(self) -> None:
        """Take the kernel back, and what it decorates. Programs called from here on run without it.

        Raises
        ------
        RegistryError
            When it is not registered for the process: it was taken back already, or belongs to a ``with`` block.
        """
        _process.remove(self)
        if self.decorated is not None:
            self.decorated.unregister()


class KernelSet:
    """The user's kernels and launch configs that are active somewhere: of the kernels' layers the first outranks.

    Compared by identity, so that sessions can be kept by it for as long as it is alive.
    """

    __slots__ = ("__weakref__", "launch_configs", "layers")

    def __init__(
        self,
        layers: Sequence[tuple[UserKernel, ...]] = (),
        launch_configs: Mapping[str, ForcedLaunchConfig] = MappingProxyType({}),
    ) -> None:
        self.layers = tuple(layer for layer in layers if layer)
        self.launch_configs = launch_configs

    def __bool__(self) -> bool:
        return bool(self.layers or self.launch_configs)


def kernels_for(layers: Sequence[Sequence[UserKernel]], device: Device) -> list[list[KernelDescriptor]]:
    """Return what of the layers is for a device; layers with nothing for it are left out."""
    fitting = [[kernel.descriptor for kernel in layer if kernel.is_for(device)] for layer in layers]
    return [layer for layer in fitting if layer]


class _Process:
    """The kernels that are registered for the process."""

    def __init__(self) -> None:
        self.active = KernelSet()
        self.kernels: tuple[UserKernel, ...] = ()
        self._lock = threading.Lock()

    def add(self, kernel: UserKernel) -> None:
        with self._lock:
            kept: list[UserKernel] = []
            for other in self.kernels:
                if not _same_name(other, kernel):
                    kept.append(other)
                elif _is_redefinition(other, kernel):
                    log.info("%r replaces the one from %s", kernel, other.descriptor.origin)
                else:
                    raise RegistryError(
                        f"two kernels named '{kernel.descriptor.name}' for {kernel.descriptor.signature} on "
                        f"'{kernel.device}': one from {other.descriptor.origin}, one from {kernel.descriptor.origin}",
                        hint="give one of them another name and priority, or unregister() the first",
                    )
            self._set((*kept, kernel))

    def remove(self, kernel: UserKernel) -> None:
        with self._lock:
            if kernel not in self.kernels:
                raise RegistryError(f"{kernel!r} is not registered for the process")
            self._set(tuple(other for other in self.kernels if other is not kernel))

    def _set(self, kernels: tuple[UserKernel, ...]) -> None:
        self.kernels = kernels
        self.active = KernelSet([kernels])


class _Scope:
    """What the ``with`` blocks around bring: kernels, those of the innermost block first, and launch configs."""

    def __init__(
        self,
        layers: tuple[tuple[UserKernel, ...], ...] = (),
        launch_configs: Mapping[str, ForcedLaunchConfig] = MappingProxyType({}),
    ) -> None:
        self.layers = layers
        self.launch_configs = launch_configs
        self._combined: tuple[KernelSet, KernelSet] | None = None

    def active(self, process: KernelSet) -> KernelSet:
        combined = self._combined
        if combined is None or combined[0] is not process:
            both = KernelSet((*self.layers, *process.layers), self.launch_configs)
            combined = self._combined = (process, both)
        return combined[1]


_process = _Process()
_scope: ContextVar[_Scope | None] = ContextVar("kagent_kernels", default=None)


def registered_kernels() -> tuple[UserKernel, ...]:
    """Return the kernels that are registered for the process, in the order of their registration."""
    return _process.kernels


def active_kernels() -> KernelSet:
    """Return the user's kernels that are active where this is called."""
    scope = _scope.get()
    return _process.active if scope is None else scope.active(_process.active)


def kernel(
    signature: str | Sequence[str],
    function: Callable[..., Any] | None = None,
    *,
    device: str,
    **fields: Any,
) -> Any:
    """Register a kernel of the program's own, for the process: as a decorator, or as a call.

    It outranks the kernels of the device's plugin, and is used by every program that is called from here on. On a
    device in host memory, such as the CPU, the function gets the operator's own arguments, which are torch tensors.
    A function with a parameter ``out`` (``out0``, ``out1``, ... where the operator returns several tensors) fills it;
    any other function returns its results.

    Parameters
    ----------
    signature
        The exact overload, such as ``aten::add.Tensor``; for a fused kernel the signatures that it computes, in order;
        ``default`` for one that takes any operator for which there is nothing else.
    function
        The kernel, a Python function; left out where this is used as a decorator, or where `source` is given.
    device
        A type (``"cpu"``: all its devices) or one device (``"opencl:1"``).
    **fields
        Further fields of the `KernelDescriptor`: `name`, `source`, `parameters`, `dtypes`, `layout`, `layouts`,
        `lazy_bits`, `allocates`, `priority`. The priority counts among the program's own kernels.

        `source` is text in the device's kernel language, or a `pathlib.Path` to it. `prototype`, the declaration of the
        kernel's function as C text, becomes `parameters`; where it is left out, it is read from the source itself.
        `derived`, `optional`, `ignore`, `only` and `types` go with it, as `kagent_core.prototype.parse_prototype` takes
        them. A kernel of source text has the name of its function, takes contiguous tensors unless `layout` says more,
        and the dtypes that its pointers have unless `dtypes` says less. Calls that give another value than the default
        for an argument that it has no parameter for are left to other kernels.

    Returns
    -------
    UserKernel
        Can be called as the function can; its ``unregister()`` takes the kernel back. Without a function and without
        a source, a decorator that returns it.

    Raises
    ------
    SignatureError
        When the installed torch has no such operator; names the nearest one.
    RegistryError
        When a field does not fit the operator, or another kernel has this name. A function that is defined anew, as
        in a notebook, replaces the old one.
    PackingError
        When the prototype cannot be read: a type that does not exist, a value derived from a wrong expression.

    Examples
    --------
    >>> import torch, kagent_core
    >>> @kagent_core.kernel("aten::relu", device="cpu")
    ... def double_relu(x):
    ...     return 2 * x.clamp(min=0)
    >>> kagent_core.run_op("aten::relu", torch.tensor([-1.0, 2.0]), device="cpu")
    tensor([0., 4.])
    >>> double_relu.unregister()
    >>> kagent_core.run_op("aten::relu", torch.tensor([-1.0, 2.0]), device="cpu")
    tensor([0., 2.])
    """

    def register(function: Callable[..., Any] | None) -> UserKernel:
        made = _make(signature, function, device, fields)
        _process.add(made)
        return made

    return register if function is None and fields.get("source") is None else register(function)


@contextlib.contextmanager
def override(
    signature: str | Sequence[str],
    function: Callable[..., Any] | None = None,
    *,
    device: str,
    **fields: Any,
) -> Iterator[UserKernel]:
    """Use a kernel of the program's own for what is called inside the ``with`` block.

    It holds for the thread (or the asyncio task) that opened the block, and ends with the block: programs called
    afterwards, compiled inside or not, run without it. An inner block outranks an outer one, and every block
    outranks the kernels that are registered for the process.

    Parameters
    ----------
    signature, function, device, **fields
        As for `kernel`.

    Raises
    ------
    SignatureError, RegistryError, PackingError
        As `kernel`.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core.kernels import override
    >>> relu = kagent_core.compile(torch.relu, device="cpu")
    >>> relu(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    >>> with override("aten::relu", lambda x: x.abs(), device="cpu"):
    ...     relu(torch.tensor([-1.0, 2.0]))
    tensor([1., 2.])
    >>> relu(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    made = _make(signature, function, device, fields)
    with activate(made):
        yield made


@contextlib.contextmanager
def activate(*kernels: UserKernel) -> Iterator[None]:
    """Use kernels that were made already for what is called inside the ``with`` block, as `override` does.

    Parameters
    ----------
    *kernels
        Such as `kernel` returned, taken back since, or `configured_kernels` returns. They compete by priority.
    """
    outer = _scope.get() or _Scope()
    token = _scope.set(_Scope((kernels, *outer.layers), outer.launch_configs))
    try:
        yield
    finally:
        _scope.reset(token)


def configured_kernels(config: Config) -> tuple[UserKernel, ...]:
    """Return the kernels of the config key ``kernels``.

    Raises
    ------
    ConfigError
        When one of them does not fit its operator; names the place in the config.
    """
    made: list[UserKernel] = []
    for signature, entries in config.kernels.items():
        for entry in entries:
            fields = entry.keywords() | {"source": marked_source(entry.text, entry.path), "origin": entry.origin}
            try:
                made.append(_make(signature, None, entry.device, fields))
            except KagentError as error:
                raise ConfigError(f"{entry.origin}: {error.message}", hint=error.hint) from error
    return tuple(made)


@contextlib.contextmanager
def force_launch_config(kernel: str, config: LaunchConfig | str) -> Iterator[None]:
    """Launch a kernel with a launch config of the program's own for what is called inside the ``with`` block.

    For comparing it with the one that the device derives, or that was tuned. It holds for the thread (or the asyncio
    task) that opened the block, and ends with the block; an inner block outranks an outer one, and every block outranks
    the config's ``launch_configs``. A kernel that has nothing to do is still not launched.

    Parameters
    ----------
    kernel
        The kernel's name, or the signature that it computes; for a fused kernel the signatures joined by ``+``. Or a
        size of problem as the profiler writes it (`kagent_core.profile.problem.problem_key`), for that size alone.
    config
        Grid, block and shared memory; or the same as text, as the config spells it: ``"4,4,1/16,16,1"``. Tile sizes of
        generated kernels, as in ``"tiles: rows=4"``, go by the signature, and leave the rest to the device.

    Raises
    ------
    LaunchConfigError
        When `config` is neither; and when a program is called for which the kernel would be launched, and the device
        cannot launch it so.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core.specs import LaunchConfig
    >>> from kagent_core.testing.fake import FakeDevice
    >>> x = torch.tensor([-1.0, 2.0])
    >>> with kagent_core.use_plugin(FakeDevice()):
    ...     with kagent_core.force_launch_config("aten::relu", LaunchConfig(block=(4096, 1, 1))):
    ...         kagent_core.run_op("aten::relu", x, device="fake:0")
    Traceback (most recent call last):
    kagent_core.errors.LaunchConfigError: kernel ... is forced to the launch config ...: 4096 threads per block, ...
    """
    forced = ForcedLaunchConfig(kernel, as_launch_config(kernel, config))
    outer = _scope.get() or _Scope()
    token = _scope.set(_Scope(outer.layers, {**outer.launch_configs, kernel: forced}))
    try:
        yield
    finally:
        _scope.reset(token)
        if not forced.used:
            told = "the launch config %s was forced on '%s', but no such kernel was launched"
            _extract_log.warning(told, forced.config, kernel)


def _make(
    signature: str | Sequence[str], function: Callable[..., Any] | None, device: str, fields: dict[str, Any]
) -> UserKernel:
    fuses = () if isinstance(signature, str) else tuple(signature)
    named = signature if isinstance(signature, str) else "+".join(signature)
    decorated = function if isinstance(function, UserKernel) else None
    if decorated is not None:
        function = decorated.descriptor.function
    origin = calling_line()
    if function is None and fields.get("source") is None:
        raise RegistryError(f"the kernel for {named} on '{device}' has neither a function nor a source ({origin})")
    made: dict[str, Any] = {"name": "user_kernel", "origin": origin}
    if function is not None:
        made["name"], made["origin"] = function_name(function), line_of(function) or origin
    fields = descriptor_fields(named, fuses, fields, function is not None)
    check_fields(named, made | fields, besides=("fuses",))
    descriptor = KernelDescriptor(named, function=function, fuses=fuses, **(made | fields))
    check_kernel(descriptor)
    if function is not None and "allocates" not in fields:
        descriptor = replace(descriptor, allocates=_allocates(descriptor, function))
    return UserKernel(Device.parse(device), descriptor, decorated)


def _allocates(kernel: KernelDescriptor, function: Callable[..., Any]) -> bool:
    """Whether a function returns its results: when it takes none to fill, and the operator makes some."""
    if any(_is_result(parameter) for parameter in kernel.parameters):
        return False
    with contextlib.suppress(TypeError, ValueError):  # not written in Python
        if any(RESULT_NAME.fullmatch(name) for name in inspect.signature(function).parameters):
            return False
    if kernel.signature == DEFAULT_SIGNATURE:
        return True
    last = resolve_overload((kernel.fuses or (kernel.signature,))[-1])
    return any(result.alias_info is None for result in last._schema.returns)


def _is_result(parameter: Parameter) -> bool:
    return parameter.access is Access.OUT or RESULT_NAME.fullmatch(parameter.name) is not None


def _same_name(one: UserKernel, other: UserKernel) -> bool:
    """Whether two kernels would meet under one name in a device's registry."""
    same_device = one.device.type == other.device.type and (
        one.device.index == other.device.index or None in (one.device.index, other.device.index)
    )
    mine, theirs = one.descriptor, other.descriptor
    return same_device and (mine.signature, mine.name) == (theirs.signature, theirs.name)


def _is_redefinition(old: UserKernel, new: UserKernel) -> bool:
    """Whether a function of a module took the place of one of the same name, as when a notebook's cell runs again."""
    if old.device != new.device or any(
        getattr(old.descriptor, field) != getattr(new.descriptor, field) for field in ("dtypes", "layout", "layouts")
    ):
        return False
    homes = {(getattr(k, "__module__", None), getattr(k, "__qualname__", "<lambda>")) for k in (old, new)}
    (_, name) = next(iter(homes))
    return len(homes) == 1 and "<" not in name
