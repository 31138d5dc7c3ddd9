"""From an operator's arguments to a kernel's."""

from __future__ import annotations

from kagent_core.errors import PackingError
from kagent_core.extract.pack_prototype import PrototypePacker
from kagent_core.specs import KernelDescriptor, LocalMemory, OpCall, PackedArg, TensorSpec
from kagent_cuda.devices import PARAMETER_NBYTES
from kagent_cuda.parameters import POINTER_NBYTES


class CudaPacker(PrototypePacker):
    """The standard one, and how much a launch can pass."""

    def pack(self, call: OpCall, kernel: KernelDescriptor) -> tuple[PackedArg, ...]:
        """Return the kernel's arguments in its prototype's order, checked and converted.

        Raises
        ------
        PackingError
            As the standard packer, and where the parameters are more than a launch can pass.
        """
        packed = super().pack(call, kernel)
        nbytes = 0
        for arg in packed:
            if isinstance(arg.value, LocalMemory) or arg.type is None:
                continue
            size = POINTER_NBYTES if isinstance(arg.value, TensorSpec) else len(arg.data or b"")
            alignment = self.abi.type(arg.type).alignment
            nbytes += -nbytes % alignment + size
        if nbytes > PARAMETER_NBYTES:
            raise PackingError(
                f"kernel '{kernel.name}' for {kernel.signature} takes {nbytes} bytes of parameters, expected at most "
                f"{PARAMETER_NBYTES}",
                hint="pass what is large in a tensor",
            )
        return packed
