"""In inference what depends on parameters only is computed once, and again however the parameters change."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import kagent_core
import kagent_core.inference
from kagent_core import hookimpl, kernel, load_config
from kagent_core.config import Config
from kagent_core.folded import RESTLESS, FoldedGraph
from kagent_core.registry import KernelRegistry
from kagent_core.specs import DeviceInfo, KernelDescriptor
from kagent_core.testing import FakeDevice
from kagent_core.testing.compare import assert_as_exact, assert_same
from kagent_core.watch.memory import make_memory_watch
from kagent_core.watch.pages import page_watcher


class Network(nn.Module):
    """A convolution with a batch normalization, and a product with a scale and a shift."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 16)
        self.scale = nn.Parameter(torch.randn(16))
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        with torch.no_grad():
            self.norm.weight.normal_()
            self.norm.bias.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.linear(x) * self.scale - 1


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[FoldedGraph]:
    """The graphs whose constants were folded while the test runs."""
    made: list[FoldedGraph] = []

    def note(*args: object, **kwargs: object) -> FoldedGraph:
        made.append(FoldedGraph(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(kagent_core.inference, "FoldedGraph", note)
    return made


def computed(graph: FoldedGraph, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an item whenever constants are computed."""
    counts: list[int] = []
    compute = graph._computed
    monkeypatch.setattr(graph, "_computed", lambda parameters: (counts.append(1), compute(parameters))[1])
    return counts


def compiled(model: nn.Module, **options: object) -> Callable[..., torch.Tensor]:
    return torch.compile(model, backend="kagent", options={"device": "cpu", **options})


def check(run: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> None:
    exact = copy.deepcopy(model).double()(x.double())
    assert_as_exact(run(x), model(x), exact, 2, "folded")


# -- changes


def _swap_object(model: Network) -> None:
    model.linear.weight = nn.Parameter(torch.randn(16, 8))


def _load(model: Network) -> None:
    other = Network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    model.load_state_dict(other.state_dict())


def _assign(model: Network) -> None:
    changed = {name: value + torch.rand(()) if value.is_floating_point() else value for name, value in state(model)}
    model.load_state_dict(changed, assign=True)


def state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.state_dict().items())


def _optimize(model: Network) -> None:
    with torch.enable_grad():
        model(torch.randn(2, 3, 8, 8)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def _set_data(model: Network) -> None:
    model.scale.data = torch.randn(16)


CHANGES: dict[str, Callable[[Network], object]] = {
    "in place": lambda m: m.conv.weight.mul_(2),
    "a buffer in place": lambda m: m.norm.running_mean.add_(1),
    "load_state_dict": _load,
    "load_state_dict with assign": _assign,
    "an optimizer step": _optimize,
    "another parameter object": _swap_object,
    "another tensor as data": _set_data,
    "one element of data": lambda m: m.conv.weight.data[7, 2, 2, 2].fill_(9),
    "numpy": lambda m: np.copyto(m.linear.weight.detach().numpy(), 0.5),
    "storage": lambda m: m.scale.untyped_storage().fill_(0),
    "a view of data": lambda m: m.norm.weight.data.view(2, 4)[1].mul_(3),
    "dlpack": lambda m: torch.from_dlpack(m.linear.bias.detach()).fill_(3),
}


@pytest.fixture(params=["pages", "fingerprints"])
def watching(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is watched by the system, where it can be, or looked at."""
    if request.param == "pages" and isinstance(page_watcher(), str):
        pytest.skip(f"pages cannot be watched here: {page_watcher()}")
    if request.param == "fingerprints":
        directory = load_config().cache_dir
        watch = make_memory_watch(directory, lambda: "not in this test")
        monkeypatch.setattr(kagent_core.inference, "memory_watch", lambda cache_dir: watch)


@pytest.mark.usefixtures("watching")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@torch.no_grad()
def test_every_change_of_a_parameter_is_noticed(
    change: Callable[[Network], object], folded: list[FoldedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    run = compiled(model)
    check(run, model, x)
    check(run, model, x)
    (graph,) = folded
    counts = computed(graph, monkeypatch)
    before = run(x)
    assert not counts
    for _ in range(2):
        change(model)
        check(run, model, x)
    assert counts
    assert not torch.equal(run(x), before)


@pytest.mark.parametrize("change", ["in place", "another parameter object", "another tensor as data", "numpy"])
@torch.no_grad()
def test_changes_are_noticed_where_dynamo_is_told_not_to_guard_modules(change: str) -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    run = compiled(model, guard_filter_fn=torch.compiler.skip_guard_on_all_nn_modules_unsafe)
    for _ in range(3):
        check(run, model, x)
        CHANGES[change](model)
    check(run, model, x)


@pytest.mark.usefixtures("watching")
@torch.no_grad()
def test_parameters_that_are_mapped_from_a_file(tmp_path: Path) -> None:
    path, model, x = tmp_path / "weights.bin", Network().eval(), torch.randn(2, 3, 8, 8)
    torch.randn(16, 8).numpy().tofile(path)
    model.linear.weight = nn.Parameter(torch.from_file(str(path), shared=False, size=128).view(16, 8))
    run = compiled(model)
    for _ in range(2):
        check(run, model, x)
    model.linear.weight.data[3, 3] = 7
    check(run, model, x)
    for _ in range(2):
        torch.randn(16, 8).numpy().tofile(path)  # shortens the file, and the tensor is what is written then
        check(run, model, x)
        torch.from_file(str(path), shared=True, size=128)[5] = 9
        check(run, model, x)


@pytest.mark.usefixtures("watching")
@torch.no_grad()
def test_memory_of_parameters_that_is_given_back_and_used_again() -> None:
    # so large that the system gets it back each time, and maps other memory at the same place
    model, x = nn.Linear(4096, 2112).eval(), torch.randn(2, 4096)
    run = compiled(model)
    check(run, model, x)
    addresses = [model.weight.data_ptr()]
    for value in range(4):
        model.weight.data = torch.empty(0)
        model.weight.data = torch.full((2112, 4096), value / 100) if value else torch.zeros(2112, 4096)
        addresses.append(model.weight.data_ptr())
        check(run, model, x)
    assert len(set(addresses)) < len(addresses)


@pytest.mark.usefixtures("watching")
@torch.no_grad()
def test_parameters_at_the_addresses_of_objects_that_are_gone(
    folded: list[FoldedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    run = compiled(model)
    check(run, model, x)
    latest = folded[0]._latest
    objects = []
    for value in range(12):
        model.scale = None
        model.scale = nn.Parameter(torch.full((16,), float(value)))
        objects.append(id(model.scale))
        check(run, model, x)
    assert len(set(objects)) < len(objects)
    if latest._same is not None:  # which must not be asked about what is gone
        monkeypatch.setattr(latest._same, "are", lambda tensors: pytest.fail("asked"))
    assert not latest.are_as_before(tuple(model.parameters()))


@torch.no_grad()
def test_constants_are_those_of_the_call_whatever_plan_runs() -> None:
    model = Network().eval()
    run = torch.compile(model, backend="kagent", options={"device": "cpu"}, dynamic=True)
    for batch in (2, 2, 2, 5, 5, 2, 5, 5, 5, 2, 2):
        for _ in range(2):
            check(run, model, torch.randn(batch, 3, 8, 8))
        model.conv.weight.data[batch, 1, 1, 1] += 1


@torch.no_grad()
def test_constants_are_those_of_the_call_in_every_thread() -> None:
    models = [Network().eval() for _ in range(3)]
    for number, model in enumerate(models):
        model.scale.fill_(number + 1)
    x = torch.randn(2, 3, 8, 8)
    run = torch.compile(lambda model, x: model(x), backend="kagent", options={"device": "cpu"})
    wanted = [run(model, x) for model in models]

    def called(number: int) -> bool:
        with torch.no_grad():
            return torch.equal(run(models[number % 3], x), wanted[number % 3])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(called, range(300)))


@pytest.mark.usefixtures("watching")
@torch.no_grad()
def test_strides_of_a_parameter_may_change_where_its_bytes_do_not() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    run = compiled(model)
    check(run, model, x)
    model.weight.data = model.weight.data.t()
    check(run, model, x)


@torch.no_grad()
def test_a_child_process_sees_its_own_changes_and_not_its_parents() -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    run = compiled(model)
    check(run, model, x)
    before = run(x)
    child = os.fork()
    if child == 0:
        same = torch.equal(run(x), before)
        model.scale.data.mul_(2)
        torch.testing.assert_close(run(x), model(x))
        os._exit(0 if same and not torch.equal(run(x), before) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(run(x), before)


@torch.no_grad()
def test_parameters_that_change_at_every_call_are_folded_no_more_until_they_rest(
    folded: list[FoldedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    run = compiled(model)
    run(x)
    counts = computed(folded[0], monkeypatch)
    for _ in range(3 * RESTLESS):
        model.scale.data.mul_(1.1)
        check(run, model, x)
    assert len(counts) < RESTLESS
    counts.clear()
    for _ in range(3 * RESTLESS):
        check(run, model, x)
    assert len(counts) == 1


@torch.no_grad()
def test_layers_that_share_a_graph_have_constants_of_their_own(
    folded: list[FoldedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [Network().eval() for _ in range(3)]
    for number, model in enumerate(models):
        model.scale.fill_(number + 1)
    x = torch.randn(2, 3, 8, 8)

    def run_one(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    run = torch.compile(run_one, backend="kagent", options={"device": "cpu"})
    for _ in range(2):
        for model in models:
            exact = copy.deepcopy(model).double()(x.double())
            assert_as_exact(run(model, x), model(x), exact, 2, "shared")
    counts = [computed(graph, monkeypatch) for graph in folded]
    for model in models:
        run(model, x)
    assert not any(counts)


@torch.no_grad()
def test_what_the_program_writes_itself_is_no_constant() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = self.count * 2
            self.count.add_(1)
            return x + doubled

    model, twin = Counting(), Counting()
    run = compiled(model)
    for _ in range(4):
        x = torch.randn(4)
        assert_same(run(x), twin(x), "counting")
    assert_same(model.count, twin.count, "count")


@torch.no_grad()
def test_a_constant_that_is_returned_is_the_callers() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            table = self.weight * 2
            return table.view(2, 3), x + table

    model = Table()
    run = compiled(model)
    x = torch.ones(6)
    for _ in range(3):
        table, total = run(x)
        assert_same((table, total), model(x), "table")
        table.fill_(-1)  # the caller's to write


@torch.no_grad()
def test_trusting_version_counters_watches_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kagent_core.inference, "memory_watch", lambda cache_dir: pytest.fail("asked for"))
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    run = compiled(model, parameters="version")
    check(run, model, x)
    model.scale.mul_(2)
    check(run, model, x)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"fold_constants": False}, {"parameters": "copied"}])
def test_folding_can_be_turned_off(options: dict[str, object], folded: list[FoldedGraph]) -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    check(compiled(model, **options), model, x)
    assert not folded


def test_training_folds_nothing(folded: list[FoldedGraph]) -> None:
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    compiled(model)(x).sum().backward()
    twin(x).sum().backward()
    assert not folded
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad, name)


@torch.no_grad()
def test_a_kernel_of_the_users_is_not_rewritten_away() -> None:
    called: list[int] = []

    @kernel("aten::gelu", device="cpu")
    def my_gelu(self: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        called.append(1)
        return torch.nn.functional.gelu(self, approximate=approximate)

    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
        x = torch.randn(4, 8)
        assert_same(compiled(model)(x), model(x), "gelu")
    finally:
        my_gelu.unregister()
    assert called


@torch.no_grad()
def test_a_kernel_of_the_devices_own_is_not_rewritten_away() -> None:
    """A device that has kernels for what was captured need not have one for what that could become."""

    class Only(FakeDevice):
        @hookimpl
        def kagent_kernel_registry(self, info: DeviceInfo, config: Config) -> KernelRegistry | None:
            if info.device.type != "fake":
                return None
            registry = KernelRegistry("fake")
            registry.add(KernelDescriptor("aten::mm", "mm", lambda x, y, out: torch.mm(x, y, out=out)))
            registry.add(KernelDescriptor("aten::mul.Tensor", "mul", lambda x, y, out: torch.mul(x, y, out=out)))
            return registry

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 6, bias=False), nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    model, x = Scaled(), torch.randn(3, 4)
    with kagent_core.use_plugin(Only()):
        got = torch.compile(model, backend="kagent", options={"device": "fake:0", "missing_kernel": "error"})(x)
    assert_same(got, model(x), "scaled")


@torch.no_grad()
def test_graphs_with_symbolic_sizes_are_folded_and_packed(folded: list[FoldedGraph]) -> None:
    model = nn.Sequential(
        nn.Conv2d(12, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(2), nn.Linear(49, 5)
    ).eval()
    run = torch.compile(model, backend="kagent", options={"device": "cpu"}, dynamic=True)
    for batch in (2, 5, 3):
        x = torch.randn(batch, 12, 9, 9)
        assert_as_exact(run(x), model(x), copy.deepcopy(model).double()(x.double()), 2, f"batch {batch}")
    (graph,) = folded
    targets = {str(node.target) for node in graph._parts.main.graph.nodes}
    assert {"kagent.block_convolution.default", "kagent.panel_product.default"} <= targets


@torch.no_grad()
def test_results_are_laid_out_as_eagers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 1)).eval()
    for x in (torch.randn(2, 3, 9, 9), torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)):
        torch._dynamo.reset()
        got, want = compiled(model)(x), model(x)
        assert got.stride() == want.stride()
        assert_as_exact(got, want, copy.deepcopy(model).double()(x.double()), 2, "strides")


@torch.no_grad()
@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.GELU, nn.Tanh])
def test_nan_and_infinities_come_through_products_and_activations(activation: type[nn.Module]) -> None:
    conv = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), activation()).eval()
    linear = nn.Sequential(nn.Linear(8, 16), activation()).eval()
    x, y = torch.randn(2, 3, 8, 8), torch.randn(5, 8)
    for t in (x, y):
        t.view(-1)[3] = float("nan")
        if activation is not nn.GELU:  # of infinity, eager PyTorch's gives NaN or infinity, as its vectors end
            t.view(-1)[11] = float("inf")
    for model, t in ((conv, x), (linear, y)):
        got, want = compiled(model)(t), model(t)
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)


# -- steps that are folded into weights


class Scaled(nn.Module):
    """A product whose columns are multiplied by numbers."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.scale = nn.Parameter(scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) * self.scale


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["auto", "all"])
@pytest.mark.parametrize("layout", ["columns apart", "turned, rows apart", "expanded"])
def test_weights_with_gaps_are_folded_without_them(layout: str, kernels: str, folded: list[FoldedGraph]) -> None:
    torch.manual_seed(0)
    weights = {
        "columns apart": torch.randn(8, 7)[:, 1::2],
        "turned, rows apart": torch.randn(3, 16)[:, ::2].t(),
        "expanded": torch.randn(1, 3).expand(8, 3),
    }
    model = Scaled(weights[layout], torch.randn(8))
    run = compiled(model, generated_kernels=kernels)
    for rows in (1, 5):
        check(run, model, torch.randn(rows, 3))
    assert folded


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["auto", "all"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_with_gaps_in_its_weight(transposed: bool, kernels: str, folded: list[FoldedGraph]) -> None:
    torch.manual_seed(0)
    conv = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 4, 3)
    conv.weight.data = torch.randn(4, 4, 3, 7)[..., 1::2]
    model = nn.Sequential(conv, nn.BatchNorm2d(4)).eval()
    model[1].running_mean.normal_()
    check(compiled(model, generated_kernels=kernels), model, torch.randn(2, 4, 7, 7))
    assert folded


@torch.no_grad()
def test_a_float64_scale_makes_a_float64_result() -> None:
    model = Scaled(torch.randn(8, 3), torch.randn(8, dtype=torch.float64))
    x = torch.randn(5, 3)
    assert_same([compiled(model)(x)], [model(x)], "a product that is scaled in float64")


@torch.no_grad()
@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), 1e30])
def test_scales_that_no_weight_can_have_are_not_folded(scale: float, folded: list[FoldedGraph]) -> None:
    torch.manual_seed(0)
    model = Scaled(torch.randn(8, 3) * 1e10, torch.randn(8))
    run, x = compiled(model), torch.randn(5, 3) * 1e-10
    check(run, model, x)
    for value in (scale, 2.0):  # and are folded again once they can
        model.scale[3] = value
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
    assert folded
