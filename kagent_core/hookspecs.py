"""Every hook that a plugin can implement.

*Providers* are called once per device: what devices there are, and what an opened device consists of.
*Stages* are called once per request, never per operator: the core's own default for each stage is itself an
implementation that runs last, so a plugin replaces a stage by returning a result, declines by returning None, or
wraps it with ``@hookimpl(wrapper=True)``.

No hook is called while a plan is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kagent_core.hooks import hookspec

if TYPE_CHECKING:
    from kagent_core.config import Config
    from kagent_core.device import ArgumentPacker, CodeGenerator, GraphOptimizer, LaunchConfigDeriver, Runtime
    from kagent_core.extract.context import ExtractionContext
    from kagent_core.registry import KernelRegistry
    from kagent_core.schedule.request import PlacementRequest
    from kagent_core.specs import (
        DeviceInfo,
        FusionPlan,
        KernelDescriptor,
        KernelTask,
        LaunchConfig,
        PackedArg,
        Placement,
        TaskFinished,
    )


@hookspec
def kagent_contract_version() -> int:
    """Return the version of the contract that the plugin was written for. Every plugin must implement it.

    Called once, when the plugin is loaded; another version than `kagent_core.device.CONTRACT_VERSION` is refused
    with an error that names both.

    Examples
    --------
    >>> from kagent_core import hookimpl
    >>> from kagent_core.testing import call_hook
    >>> class Plugin:
    ...     @hookimpl
    ...     def kagent_contract_version(self):
    ...         return 1
    >>> call_hook(Plugin(), "kagent_contract_version")
    [1]
    """
    raise NotImplementedError


@hookspec
def kagent_devices(config: Config) -> Sequence[DeviceInfo]:
    """Return the plugin's devices, each available or with the reason why not.

    The devices' type must be the name of the plugin's entry point. Must not raise because a driver is missing:
    that is data. Called when a device of this plugin is wanted, or when all devices are listed.

    Examples
    --------
    >>> from kagent_core import hookimpl
    >>> from kagent_core.config import Config
    >>> from kagent_core.specs import Device, DeviceInfo
    >>> from kagent_core.testing import call_hook
    >>> class Plugin:
    ...     @hookimpl
    ...     def kagent_devices(self, config):
    ...         return [DeviceInfo(Device("toy", 0), "Toy 3000", reason="no driver found; install toy-driver")]
    >>> [[info]] = call_hook(Plugin(), "kagent_devices", config=Config())
    >>> str(info.device), info.available
    ('toy:0', False)
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_kernel_registry(info: DeviceInfo, config: Config) -> KernelRegistry | None:
    """Return the kernel registry of a device of this plugin; None for any other device.

    The core freezes it. Called once per opened device.

    Examples
    --------
    >>> from kagent_core import hookimpl
    >>> from kagent_core.config import Config
    >>> from kagent_core.registry import KernelRegistry
    >>> from kagent_core.specs import Device, DeviceInfo, KernelDescriptor
    >>> from kagent_core.testing import call_hook
    >>> class Plugin:
    ...     @hookimpl
    ...     def kagent_kernel_registry(self, info, config):
    ...         if info.device.type != "toy":
    ...             return None
    ...         registry = KernelRegistry("toy")
    ...         registry.add(KernelDescriptor("aten::neg", "toy_neg", function=lambda out, x: None))
    ...         return registry
    >>> info = DeviceInfo(Device("toy", 0), "Toy 3000")
    >>> call_hook(Plugin(), "kagent_kernel_registry", info=info, config=Config()).signatures()
    ['aten::neg']
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_argument_packer(info: DeviceInfo, config: Config) -> ArgumentPacker | None:
    """Return the argument packer of a device of this plugin; None for any other device.

    Examples
    --------
    >>> from kagent_core import hookimpl
    >>> from kagent_core.config import Config
    >>> from kagent_core.extract.packing import CallPacker
    >>> from kagent_core.specs import Device, DeviceInfo
    >>> from kagent_core.testing import call_hook
    >>> class Plugin:
    ...     @hookimpl
    ...     def kagent_argument_packer(self, info, config):
    ...         return CallPacker() if info.device.type == "toy" else None
    >>> info = DeviceInfo(Device("toy", 0), "Toy 3000")
    >>> type(call_hook(Plugin(), "kagent_argument_packer", info=info, config=Config())).__name__
    'CallPacker'
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_launch_config_deriver(info: DeviceInfo, config: Config) -> LaunchConfigDeriver | None:
    """Return the launch-config deriver of a device of this plugin; None for any other device.

    Examples
    --------
    >>> from kagent_core import hookimpl
    >>> from kagent_core.config import Config
    >>> from kagent_core.device import LaunchConfigDeriver
    >>> from kagent_core.specs import Device, DeviceInfo, LaunchConfig
    >>> from kagent_core.testing import call_hook
    >>> class OneThread(LaunchConfigDeriver):
    ...     def derive(self, calls, kernel, info):
    ...         return LaunchConfig()
    >>> class Plugin:
    ...     @hookimpl
    ...     def kagent_launch_config_deriver(self, info, config):
    ...         return OneThread() if info.device.type == "toy" else None
    >>> info = DeviceInfo(Device("toy", 0), "Toy 3000")
    >>> print(call_hook(Plugin(), "kagent_launch_config_deriver", info=info, config=Config()).derive((), None, info))
    grid (1, 1, 1) x block (1, 1, 1)
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_runtime(info: DeviceInfo, config: Config) -> Runtime | None:
    """Open a device of this plugin and return its runtime; None for any other device.

    Called once per opened device, the first time that a program is placed on it.

    Examples
    --------
    >>> from kagent_core import hookimpl
    >>> from kagent_core.config import Config
    >>> from kagent_core.specs import Device, DeviceInfo
    >>> from kagent_core.testing import call_hook
    >>> from kagent_core.testing.fake import FakeRuntime
    >>> class Plugin:
    ...     @hookimpl
    ...     def kagent_runtime(self, info, config):
    ...         return FakeRuntime() if info.device.type == "toy" else None
    >>> info = DeviceInfo(Device("toy", 0), "Toy 3000")
    >>> type(call_hook(Plugin(), "kagent_runtime", info=info, config=Config())).__name__
    'FakeRuntime'
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_code_printer(info: DeviceInfo, config: Config) -> CodeGenerator | None:
    """Return the `CodeGenerator` of a device of this plugin; None when it has none (optional).

    Examples
    --------
    >>> from kagent_core import hookimpl
    >>> from kagent_core.config import Config
    >>> from kagent_core.specs import Device, DeviceInfo
    >>> from kagent_core.testing import call_hook
    >>> class Plugin:
    ...     @hookimpl
    ...     def kagent_code_printer(self, info, config):
    ...         return None
    >>> info = DeviceInfo(Device("toy", 0), "Toy 3000")
    >>> call_hook(Plugin(), "kagent_code_printer", info=info, config=Config()) is None
    True
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_graph_optimizer(info: DeviceInfo, config: Config) -> GraphOptimizer | None:
    """Return the `GraphOptimizer` of a device of this plugin; None when it has none (optional).

    Examples
    --------
    >>> from kagent_core import hookimpl
    >>> from kagent_core.config import Config
    >>> from kagent_core.device import GraphOptimizer
    >>> from kagent_core.specs import Device, DeviceInfo
    >>> from kagent_core.testing import call_hook
    >>> class Tell(GraphOptimizer):
    ...     def optimize(self, graph):
    ...         print(len(graph.graph.nodes), "nodes")
    >>> class Plugin:
    ...     @hookimpl
    ...     def kagent_graph_optimizer(self, info, config):
    ...         return Tell() if info.device.type == "toy" else None
    >>> info = DeviceInfo(Device("toy", 0), "Toy 3000")
    >>> type(call_hook(Plugin(), "kagent_graph_optimizer", info=info, config=Config())).__name__
    'Tell'
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_place(request: PlacementRequest) -> Sequence[Placement] | None:
    """Stage of the SchedulerAgent: return one placement per call of the program.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core import hookimpl
    >>> class Announce:
    ...     @hookimpl(wrapper=True)
    ...     def kagent_place(self, request):
    ...         placements = yield
    ...         print(request.program.calls[0].signature, "on", placements[0].device)
    ...         return placements
    >>> with kagent_core.use_plugin(Announce()):
    ...     kagent_core.run_op("aten::relu", torch.tensor([-1.0, 2.0]), device="cpu")
    aten::relu on cpu
    tensor([0., 2.])
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_validate(ctx: ExtractionContext) -> str | None:
    """Stage 1 of the ExtractorAgent: check the request; return a summary or raise `ValidationError`.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core import hookimpl
    >>> from kagent_core.errors import ValidationError
    >>> class NoDoubles:
    ...     @hookimpl
    ...     def kagent_validate(self, ctx):
    ...         for call in ctx.request.calls:
    ...             if any(spec.dtype.name == "float64" for spec in call.inputs):
    ...                 raise ValidationError(f"{call.name} works on float64, which this project forbids")
    >>> with kagent_core.use_plugin(NoDoubles()):
    ...     kagent_core.run_op("aten::relu", torch.tensor([1.0], dtype=torch.float64), device="cpu")
    Traceback (most recent call last):
    kagent_core.errors.ValidationError: relu works on float64, which this project forbids
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_analyze_fusion(ctx: ExtractionContext) -> FusionPlan | None:
    """Stage 2: return the fusion groups; every call of the request is in exactly one, in a valid order.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core import hookimpl
    >>> class Count:
    ...     @hookimpl(wrapper=True)
    ...     def kagent_analyze_fusion(self, ctx):
    ...         plan = yield
    ...         print(len(ctx.request.calls), "call,", len(plan.groups), "group")
    ...         return plan
    >>> with kagent_core.use_plugin(Count()):
    ...     kagent_core.run_op("aten::relu", torch.tensor([-1.0, 2.0]), device="cpu")
    1 call, 1 group
    tensor([0., 2.])
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_lookup_kernels(ctx: ExtractionContext) -> Sequence[KernelDescriptor] | None:
    """Stage 3: return one kernel per fusion group.

    Examples
    --------
    A kernel of one's own for one operator, with no plugin:

    >>> import torch, kagent_core
    >>> from kagent_core import hookimpl
    >>> from kagent_core.specs import KernelDescriptor
    >>> def double_relu(x):
    ...     return 2 * x.clamp(min=0)
    >>> class Override:
    ...     @hookimpl(wrapper=True)
    ...     def kagent_lookup_kernels(self, ctx):
    ...         kernels = yield
    ...         mine = KernelDescriptor("aten::relu", "double_relu", function=double_relu, allocates=True)
    ...         return [mine if kernel.signature == "aten::relu" else kernel for kernel in kernels]
    >>> with kagent_core.use_plugin(Override()):
    ...     kagent_core.run_op("aten::relu", torch.tensor([-1.0, 2.0]), device="cpu")
    tensor([0., 4.])
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_pack_arguments(ctx: ExtractionContext) -> Sequence[tuple[PackedArg, ...]] | None:
    """Stage 4: return the packed arguments of each group, in its kernel's order.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core import hookimpl
    >>> class Show:
    ...     @hookimpl(wrapper=True)
    ...     def kagent_pack_arguments(self, ctx):
    ...         packed = yield
    ...         print([(arg.name, str(arg.value)) for arg in packed[0]])
    ...         return packed
    >>> with kagent_core.use_plugin(Show()):
    ...     kagent_core.run_op("aten::cumsum", torch.tensor([1.0, 2.0]), 0, device="cpu")
    [('self', 'f32[2]'), ('dim', '0'), ('out', 'f32[2]')]
    tensor([1., 3.])
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_derive_launch_configs(ctx: ExtractionContext) -> Sequence[LaunchConfig | None] | None:
    """Stage 5: return a launch config per group; None where there is nothing to launch.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core import hookimpl
    >>> from kagent_core.specs import LaunchConfig
    >>> class OneBlock:
    ...     @hookimpl
    ...     def kagent_derive_launch_configs(self, ctx):
    ...         return [LaunchConfig() for group in ctx.fusion.groups]
    >>> with kagent_core.use_plugin(OneBlock()):
    ...     kagent_core.run_op("aten::relu", torch.tensor([-1.0, 2.0]), device="cpu")
    tensor([0., 2.])
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def kagent_assemble(ctx: ExtractionContext) -> Sequence[KernelTask] | None:
    """Stage 6: return the complete KernelTasks; the ExtractorAgent submits them to the queue.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core import hookimpl
    >>> class Ranges:
    ...     @hookimpl(wrapper=True)
    ...     def kagent_assemble(self, ctx):
    ...         tasks = yield
    ...         for task in tasks:
    ...             print("reads", *task.reads, "writes", *task.writes)
    ...         return tasks
    >>> with kagent_core.use_plugin(Ranges()):
    ...     kagent_core.run_op("aten::relu", torch.tensor([-1.0, 2.0]), device="cpu")
    reads b0[0:8] writes b1[0:8]
    tensor([0., 2.])
    """
    raise NotImplementedError


@hookspec
def kagent_task_finished(event: TaskFinished) -> None:
    """Event of the ExecutorAgent: a task of an observed run has finished, or failed.

    A plan's first run is observed when a plugin implements this hook; with ``profile`` set, every run is.

    Examples
    --------
    >>> import torch, kagent_core
    >>> from kagent_core import hookimpl
    >>> class Log:
    ...     @hookimpl
    ...     def kagent_task_finished(self, event):
    ...         print("finished", event.task.name)
    >>> with kagent_core.use_plugin(Log()):
    ...     kagent_core.run_op("aten::relu", torch.tensor([-1.0, 2.0]), device="cpu")
    finished relu
    tensor([0., 2.])
    """
    raise NotImplementedError
