"""Launches that are started as one: a CUDA graph.

Its nodes are kernels, its edges what must come after what, so that the device runs independent chains side by side; no
stream has to be captured for that. cuda-core makes graphs of kernels whose arguments it packs itself; here they are
bytes already, and so the driver is given the nodes through cuda-bindings.

When memory of an argument moves, the parameters of the launches that use it are replaced in the graph, which costs the
host some microseconds for each of them, and the device nothing. Copying into memory that stays where it is would cost
the device both bandwidth and room; what comes from the host is copied into such memory anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kagent_core.device import Launch, Recording
from kagent_core.specs import LaunchConfig
from kagent_cuda.parameters import HeldParameters

Pack = Callable[[Any, LaunchConfig, Sequence[Any]], HeldParameters]
"""Packs and checks the parameters of a launch."""


class CudaGraph(Recording):
    """A graph of kernels.

    Parameters
    ----------
    driver
        ``cuda.bindings.driver``.
    checked
        Returns what the driver answers, or raises.
    definition
        An empty ``cuda.core.graph.GraphDefinition``.
    launches
        What it starts.
    pack
        Packs parameters.
    stream
        Returns the stream to start it on.
    """

    def __init__(
        self,
        driver: Any,
        checked: Callable[[tuple[Any, ...]], Any],
        definition: Any,
        launches: Sequence[Launch],
        pack: Pack,
        stream: Callable[[], Any],
    ) -> None:
        self._driver = driver
        self._checked = checked
        self._launches = tuple(launches)
        self._pack = pack
        self._stream = stream
        self._definition = definition  # its nodes are what parameters are replaced by
        self._nodes: list[Any] = []
        graph = driver.CUgraph(int(definition.handle))
        for launch in launches:
            held, parameters = self._parameters(launch, launch.args)
            after = [self._nodes[position] for position in launch.after]
            self._nodes.append(checked(driver.cuGraphAddKernelNode(graph, after, len(after), parameters)))
            del held  # the driver has copied the parameters
        self._graph = definition.instantiate()
        self._graph.upload(stream())

    def start(self) -> None:
        """Start the graph."""
        self._graph.launch(self._stream())

    def update(self, position: int, args: Sequence[Any]) -> None:
        """Replace the parameters of one launch."""
        held, parameters = self._parameters(self._launches[position], args)
        executable = self._driver.CUgraphExec(int(self._graph.handle))
        self._checked(self._driver.cuGraphExecKernelNodeSetParams(executable, self._nodes[position], parameters))
        del held

    def close(self) -> None:
        """Destroy the graph."""
        self._graph.close()

    def _parameters(self, launch: Launch, args: Sequence[Any]) -> tuple[HeldParameters, Any]:
        """Return the packed parameters, which must outlive the driver's call, and the driver's view of the node."""
        held = self._pack(launch.kernel, launch.config, args)
        node = self._driver.CUDA_KERNEL_NODE_PARAMS()
        node.func = launch.kernel.function
        node.gridDimX, node.gridDimY, node.gridDimZ = launch.config.grid
        node.blockDimX, node.blockDimY, node.blockDimZ = launch.config.block
        node.sharedMemBytes = launch.config.shared_nbytes
        node.kernelParams = held.address
        return held, node
