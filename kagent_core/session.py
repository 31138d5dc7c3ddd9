"""A session: one config, its plugins, its opened devices and the four agents."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kagent_core.codegen.generator import ExpressionGenerator
from kagent_core.config import TRACE, Config
from kagent_core.device import Observer, OpenDevice
from kagent_core.execute.agent import ExecutorAgent
from kagent_core.extract.agent import ExtractorAgent
from kagent_core.extract.launch_choice import ForcedLaunchConfig, choose_tiles
from kagent_core.extract.stages import DefaultStages
from kagent_core.hooks import reject_without_hooks
from kagent_core.inspect import logs
from kagent_core.inspect.report import PlanReport
from kagent_core.kernels import KernelSet, UserKernel, active_kernels, configured_kernels, kernels_for
from kagent_core.plugins import PluginManager
from kagent_core.profile.file import profile_path
from kagent_core.profile.problem import problem_key, size_class
from kagent_core.schedule.agent import SchedulerAgent
from kagent_core.schedule.stages import DefaultPlacement
from kagent_core.single import SingleOperators
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig, OpCall, TaskFinished
from kagent_core.specs.tiles import TileChoice

if TYPE_CHECKING:
    from kagent_core.execute.plan import ExecutionPlan
    from kagent_core.execute.pool import MemoryUse
    from kagent_core.profile.agent import ProfilerAgent

_execute_log = logs.get_logger("execute")


class Session:
    """Everything that compiling and running a program needs. Built from a config; holds no global state.

    Parameters
    ----------
    config
        Validated settings.
    extra
        Plugins that the running program registers itself, by name.

    Raises
    ------
    ConfigError
        When a kernel of the config does not fit its operator.
    DeviceError
        When the config's device does not exist or cannot be used.
    PluginError
        When a plugin that is needed is broken.
    """

    def __init__(self, config: Config, extra: Sequence[tuple[str, object]] = ()) -> None:
        self.config = config
        core = (("kagent-extract", DefaultStages()), ("kagent-schedule", DefaultPlacement()))
        self.plugins = PluginManager(config, (*core, *extra))
        self.plugins.load_stages()
        self.target: DeviceInfo = self.plugins.resolve(config.device)
        self._configured = configured_kernels(config)
        self.scheduler = self._new_scheduler()
        self.extractor = ExtractorAgent(self.plugins.hooks, config)
        self.reports: deque[PlanReport] = deque(maxlen=256)
        self.single = SingleOperators()
        self.abandoned: deque[Mapping[Any, ExecutionPlan]] = deque()
        self._executors: dict[Device, ExecutorAgent] = {}
        self._lock = threading.RLock()
        self._base: Session | None = None
        self._variants: WeakKeyDictionary[KernelSet, Session] = WeakKeyDictionary()
        self._user_kernels: Sequence[Sequence[UserKernel]] = ()
        self.forced_launch_configs: Mapping[str, ForcedLaunchConfig] = {}
        self._overlaid: dict[Device, OpenDevice] = {}
        self._profiles = config.profile  # asked for at every call, and slow to read from the config

    @property
    def base(self) -> Session:
        """The session without any of the program's own kernels."""
        return self._base or self

    def with_kernels(self, kernels: KernelSet) -> Session:
        """Return this session with some of the program's own kernels, and no others.

        It shares plugins, opened devices and executors with `base`; only registries look different in it. The session
        keeps it for as long as the set is alive.
        """
        base = self.base
        if not kernels:
            return base
        with base._lock:
            if kernels not in base._variants:
                variant = copy.copy(base)
                variant._base, variant._user_kernels, variant._overlaid = base, kernels.layers, {}
                variant.forced_launch_configs = kernels.launch_configs
                variant.scheduler, variant.single = variant._new_scheduler(), SingleOperators()
                base._variants[kernels] = variant
            return base._variants[kernels]

    @functools.cached_property
    def profiler(self) -> ProfilerAgent:
        """The ProfilerAgent; made when something is written to its file or the file is there, so that none is made."""
        from kagent_core.profile.agent import ProfilerAgent

        if self._base is not None:
            return self._base.profiler
        return ProfilerAgent(profile_path(self.config))

    @functools.cached_property
    def _suggests(self) -> bool:
        """Whether the ProfilerAgent is asked for launch configs. Where it has no file, there is nothing to ask for."""
        return self.config.profile or (self.config.tuned and profile_path(self.config).exists())

    def open(self, device: Device) -> OpenDevice:
        """Return a device, opened once."""
        return self._open(self.plugins.resolve(str(device)))

    def may_rewrite(self, signature: str) -> bool:
        """Whether calls of an operator may become others: not where somebody has a kernel or a device for them.

        A kernel that was registered, by the program or by the device's plugin, is for the operator as it was captured;
        the device need not have one for what that could become.
        """
        kernels = self.open(self.target.device).registry.kernels()
        own = any(signature == kernel.signature or signature in kernel.fuses for kernel in kernels)
        return not own and signature not in self.config.placement

    def on_fallback_device(self) -> Session:
        """Return the process's session with the same config, but for the fallback device as its target."""
        return session_for(self.config.replace(device=self.config.fallback_device))

    def for_one_operator(self) -> Session:
        """Return this session for operators that run by themselves: compiling a kernel for each would not pay.

        Where ``generated_kernels`` is ``auto``, what a device's registry resolves comes before generated kernels.
        """
        if self.config.generated_kernels != "auto":
            return self
        variant = copy.copy(self)
        variant.config = self.config.replace(generated_kernels="off")
        variant.extractor = ExtractorAgent(self.plugins.hooks, variant.config)
        return variant

    def executor_for(self, device: Device) -> ExecutorAgent:
        """Return the device's ExecutorAgent."""
        with self._lock:
            if device not in self._executors:
                config = self.config
                self._executors[device] = ExecutorAgent(
                    self.base.open(device), config.device_memory_limit, config.parameters, config.cache_dir
                )
            return self._executors[device]

    def memory_use(self) -> dict[Device, MemoryUse]:
        """Return what the memory of each device is used for, of those that this session has run something on.

        A device in host memory is left out: what it uses is PyTorch's.
        """
        with self._lock:
            executors = list(self._executors.values())
        return {e.opened.device: e.memory_use() for e in executors if not e.opened.runtime.host_memory}

    def suggest(self, info: DeviceInfo, kernel: KernelDescriptor, calls: Sequence[OpCall]) -> LaunchConfig | None:
        """Ask the ProfilerAgent for the best launch config known on a device."""
        suggested = self._suggest(info, kernel.name, calls)
        if suggested is None and kernel.packed is not None:  # its name is that of its text, which tile sizes change
            suggested = self._suggest(info, kernel.signature, calls)
        return suggested

    @property
    def watches_every_run(self) -> bool:
        """Whether every run is observed task by task: to be timed, or to have its pointers logged."""
        return self._profiles or _execute_log.isEnabledFor(TRACE)

    def observer(self, first_run: bool) -> Observer | None:
        """Return what watches a run task by task, or None when nothing wants to.

        With ``profile`` every run is observed, and with ``KAGENT_LOGS=execute=trace``; else a plan's first one, if a
        plugin asks for the event.
        """
        wanted = bool(self.plugins.hooks.implementers("kagent_task_finished"))
        if self.watches_every_run or (first_run and wanted):
            return self._task_finished
        return None

    def close_abandoned(self) -> None:
        """Give back the memory of plans whose graph is gone. Called before more memory is taken."""
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self.abandoned:
                for plan in self.abandoned.popleft().values():
                    plan.close()
                self.release_unused()

    def release_unused(self) -> None:
        """Give devices back what is kept for reuse, and what parameters that are gone have left."""
        for executor in list(self._executors.values()):
            executor.release_unused()

    def close(self) -> None:
        """Write the profile down and close every device."""
        if self._base is not None:
            self._base.close()
            return
        if "profiler" in self.__dict__:
            self.profiler.close()
        self.plugins.close()

    def _new_scheduler(self) -> SchedulerAgent:
        return SchedulerAgent(self.plugins.hooks, self.config, self.plugins.resolve, self._open, self._time_ms)

    def _open(self, info: DeviceInfo) -> OpenDevice:
        opened = self.plugins.open(info)
        layers = kernels_for((*self._user_kernels, self._configured), info.device)
        tiled = self._has_tiles() and isinstance(opened.printer, ExpressionGenerator)
        if not layers and not tiled:
            return opened
        with self._lock:
            if info.device not in self._overlaid:
                if layers:
                    opened = replace(opened, registry=opened.registry.overlaid(*layers))
                if isinstance(opened.printer, ExpressionGenerator):
                    choose = functools.partial(self._choose_tiles, info)
                    opened = replace(opened, printer=opened.printer.with_tiles(choose))
                self._overlaid[info.device] = opened
            return self._overlaid[info.device]

    def _has_tiles(self) -> bool:
        """Whether tile sizes may come from elsewhere than the device."""
        forced = [each.config for each in self.forced_launch_configs.values()]
        return self._suggests or any(c.tiles for c in (*forced, *self.config.launch_configs.values()))

    def _choose_tiles(self, info: DeviceInfo, calls: Sequence[OpCall]) -> TileChoice:
        named = {name: ForcedLaunchConfig(name, config) for name, config in self.config.launch_configs.items()}
        signature = "+".join(call.signature for call in calls)
        return choose_tiles(calls, {**named, **self.forced_launch_configs}, self._suggest(info, signature, calls))

    def _suggest(self, info: DeviceInfo, kernel: str, calls: Sequence[OpCall]) -> LaunchConfig | None:
        if not self._suggests or not self.profiler.has_configs(info):
            return None
        exact = self.profiler.suggest(info, kernel, problem_key(calls))
        if exact is not None or kernel != "+".join(call.signature for call in calls):
            return exact
        return self.profiler.suggest(info, calls[0].signature, size_class(calls[0]))

    def _task_finished(self, event: TaskFinished) -> None:
        if self.config.profile and event.error is None:
            self.profiler.record(self.open(event.task.device).info, event)
        self.plugins.hooks.call.kagent_task_finished(event=event)

    def _time_ms(self, device: Device, call: OpCall) -> float | None:
        if not self.config.profile:
            return None
        return self.profiler.time_ms(self.open(device).info, call)


class _Sessions:
    """The process's sessions, by config and by the plugins that the program registered."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: dict[tuple[Config, tuple[int, ...]], Session] = {}
        self._extra: list[tuple[str, object]] = []
        self._count = 0

    def get(self, config: Config) -> Session:
        with self._lock:
            key = (config, tuple(id(plugin) for _, plugin in self._extra))
            if key not in self._known:
                logs.configure(config.logs)
                self._known[key] = Session(config, tuple(self._extra))
            return self._known[key]

    @contextlib.contextmanager
    def extra(self, plugin: object, name: str | None) -> Iterator[None]:
        with self._lock:
            self._count += 1
            entry = (name or f"{type(plugin).__name__}-{self._count}", plugin)
            self._extra.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._extra.remove(entry)
                left = [self._known.pop(key) for key in list(self._known) if id(plugin) in key[1]]
            for session in left:  # what is compiled may still be called; what is gone gives its memory back
                session.close_abandoned()


_sessions = _Sessions()


def session_for(config: Config) -> Session:
    """Return the process's session for a config, made the first time that it is asked for.

    Where kernels of the program's own are active, it is the session with those.

    Raises
    ------
    KagentError
        As `Session`.
    """
    return _sessions.get(config).with_kernels(active_kernels())


@contextlib.contextmanager
def use_plugin(plugin: object, name: str | None = None) -> Iterator[None]:
    """Register a plugin of the running program for what is compiled inside the ``with`` block.

    Parameters
    ----------
    plugin
        A module or an object with methods marked ``@kagent_core.hookimpl``.
    name
        For messages; made from its class by default.

    Raises
    ------
    PluginError
        When the plugin implements no hook.

    Examples
    --------
    >>> from kagent_core import hookimpl, use_plugin
    >>> class Quiet:
    ...     @hookimpl
    ...     def kagent_task_finished(self, event):
    ...         pass
    >>> with use_plugin(Quiet()):
    ...     pass
    """
    reject_without_hooks(plugin)
    with _sessions.extra(plugin, name):
        yield
