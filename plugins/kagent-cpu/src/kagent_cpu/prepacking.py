"""Products and convolutions with constant weights run in oneDNN, with weights that were packed for it once.

On an AMD processor with AVX-512, a float32 product took half the time of ``aten::addmm``, which MKL computes; others
were not tried (``kagent bench models`` shows whole models). Convolutions give and take channels-last tensors, so that
neighbours need no conversion.
"""

from __future__ import annotations

import functools

import torch
from torch.fx import Node

from kagent_core.device import GraphOptimizer
from kagent_core.inspect.logs import get_logger
from kagent_core.optimize.inference_graph import InferenceGraph
from kagent_core.optimize.recurrent import compute_inputs_first
from kagent_core.optimize.single_places import as_product, is_of_single_places
from kagent_cpu.activations import activation_after
from kagent_cpu.direct import is_direct, is_direct_transposed, lay_out, lay_out_transposed
from kagent_cpu.direct_products import is_direct_product, lay_out_product
from kagent_cpu.recurrent import packed_shape_of_steps
from kagent_cpu.reduced_precision import in_bfloat16, packed_dtypes, why_not_in

log = get_logger("capture")

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


class Prepacking(GraphOptimizer):
    """Packs weights for oneDNN.

    Parameters
    ----------
    float32_products
        What products and convolutions of float32 tensors are computed in.
    generates
        Whether there are generated kernels.
    threads
        That they run on.
    """

    def __init__(self, float32_products: str = "float32", generates: bool = False, threads: int = 1) -> None:
        self._generates = generates
        self._threads = threads
        self._reduces = float32_products == "bfloat16" and why_not_in("bfloat16") is None

    def why_not_float32_products_in(self, dtype: str) -> str | None:
        """Return why float32 products cannot be computed in another type."""
        return why_not_in(dtype)

    def optimize(self, graph: InferenceGraph) -> None:
        """Replace products and convolutions whose weights are constants."""
        self._pack(graph)
        graph.clean()
        reduced = sum("reduced" in node.meta for node in graph.graph.nodes)
        if reduced:
            log.info("%d products and convolutions of float32 tensors are computed in bfloat16, as asked for", reduced)

    def _pack(self, graph: InferenceGraph) -> None:
        if self._generates:
            compute_inputs_first(graph, functools.partial(packed_shape_of_steps, self._threads))
        self._pack_convolutions(graph)
        self._pack_products(graph)

    def _pack_convolutions(self, graph: InferenceGraph) -> None:
        for node in graph.calls(aten.convolution.default):
            if not _is_packable_convolution(graph, node):
                continue
            if node.args[6]:
                if self._generates and is_direct_transposed(graph, node):
                    lay_out_transposed(graph, node)
                continue
            if self._generates and not self._reduces and is_of_single_places(graph, node):
                as_product(graph, node)
                continue
            convolution = self._reduced(graph, node)
            if _is_garbled(graph, convolution):
                _read_contiguously(graph, convolution)
            elif self._generates and is_direct(graph, convolution, self._threads):
                lay_out(graph, convolution)
            else:
                _pack_convolution(graph, convolution)

    def _pack_products(self, graph: InferenceGraph) -> None:
        for node in graph.calls(aten.addmm.default, aten.mm.default):
            if not _is_packable_product(graph, node):
                continue
            product = self._reduced(graph, node)
            one_row = _has_one_row(graph, product)
            if self._generates and is_direct_product(graph, product):
                lay_out_product(graph, product)
            # a single row reads each weight once, in whatever order it lies: there MKL is faster, which has no bfloat16
            elif not (one_row and graph.fake(product).dtype is torch.float32):
                _pack_product(graph, product)

    def _reduced(self, graph: InferenceGraph, node: Node) -> Node:
        return in_bfloat16(graph, node) if self._reduces and graph.fake(node).dtype is torch.float32 else node


def _is_packable_convolution(graph: InferenceGraph, node: Node) -> bool:
    _, weight, bias, *_ = node.args
    fake = graph.fake(node)
    constant = graph.is_constant(weight) and graph.is_constant(bias) and not graph.is_constant(node)
    known = fake.dim() == 4 and fake.dtype in packed_dtypes()
    return constant and known and not _is_empty(fake) and graph.is_free(node)


def _is_garbled(graph: InferenceGraph, node: Node) -> bool:
    """Whether oneDNN reads what nobody wrote, with a packed weight or channels-last.

    In bfloat16 it does where groups make several channels of one, with steps that are longer than a line.
    """
    weight, groups = graph.fake(node.args[1]), node.args[-1]
    made, read, *_ = weight.shape
    return bool(groups != 1 == read and made != groups and weight.dtype is torch.bfloat16)


def _read_contiguously(graph: InferenceGraph, node: Node) -> None:
    with graph.before(node):
        source = graph.call(aten.clone.default, node.args[0], memory_format=torch.contiguous_format)
        graph.replace(node, graph.call(aten.convolution.default, source, *node.args[1:]))


def _pack_convolution(graph: InferenceGraph, node: Node) -> None:
    source, weight, bias, stride, padding, dilation, _, _, groups = node.args
    geometry = (padding, stride, dilation, groups)
    activation = activation_after(graph, node)
    with graph.before(node):
        packed = graph.prepared(
            _packed_convolution_weight, weight, *geometry, _known_sizes(graph.fake(source)), like=graph.fake(weight)
        )
        arguments = activation.arguments if activation is not None else ("none", [], "")
        made = graph.call(torch.ops.mkldnn._convolution_pointwise.default, source, packed, bias, *geometry, *arguments)
    graph.replace(activation.last if activation is not None else node, made)


def _packed_convolution_weight(
    weight: torch.Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    size: list[int] | None,
) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_convolution_weight(weight, padding, stride, dilation, groups, size)  # type: ignore[no-any-return]


def _is_packable_product(graph: InferenceGraph, node: Node) -> bool:
    weight, fake = node.args[-1], graph.fake(node)
    if node.kwargs or not graph.is_constant(weight) or graph.is_constant(node) or not graph.is_free(node):
        return False
    if node.target is aten.addmm.default:
        bias = node.args[0]
        if not graph.is_constant(bias) or graph.fake(bias).shape != fake.shape[1:]:
            return False
    return fake.dtype in packed_dtypes() and not _is_empty(fake) and not _is_empty(graph.fake(weight))


def _has_one_row(graph: InferenceGraph, node: Node) -> bool:
    return (_known_sizes(graph.fake(node)) or [0])[0] == 1


def _pack_product(graph: InferenceGraph, node: Node) -> None:
    bias = node.args[0] if node.target is aten.addmm.default else None
    source, weight = node.args[-2:]
    sizes = _known_sizes(graph.fake(node))
    result = _seen_as(graph, node)
    activation = activation_after(graph, result)
    with graph.before(node):
        packed = graph.prepared(_packed_product_weight, weight, sizes and sizes[0], like=graph.fake(weight).t())
        arguments = activation.arguments if activation is not None else ("none", [], "")
        made = graph.call(torch.ops.mkldnn._linear_pointwise.default, source, packed, bias, *arguments)
    graph.replace(node, made)
    if activation is not None:
        graph.replace(activation.last, made if result is node else result)


def _seen_as(graph: InferenceGraph, node: Node) -> Node:
    """Return the view through which alone a product is used, or the product."""
    user = graph.only_user(node)
    return user if user is not None and user.target in _VIEWS else node


def _packed_product_weight(weight: torch.Tensor, rows: int | None) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.t().contiguous(), rows)  # type: ignore[no-any-return]


def _known_sizes(fake: torch.Tensor) -> list[int] | None:
    """Return a tensor's sizes; None where some are symbols, for which oneDNN packs as for any."""
    sizes: list[object] = list(fake.shape)
    return [size for size in sizes if isinstance(size, int)] if all(isinstance(s, int) for s in sizes) else None


def _is_empty(fake: torch.Tensor) -> bool:
    """Whether a size is 0; symbols stand for sizes of at least 2."""
    sizes: list[object] = list(fake.shape)
    return any(isinstance(size, int) and size == 0 for size in sizes)
