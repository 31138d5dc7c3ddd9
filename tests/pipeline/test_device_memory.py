"""Memory of a device that has its own: parameters go there once and again when they change; idle plans make room."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kagent_core
from kagent_core.capture.graph import CapturedGraph
from kagent_core.errors import ExecutionError
from kagent_core.execute import model_parameters
from kagent_core.pipeline import CompiledGraph
from kagent_core.testing.fake import FakeDevice, FakeRuntime

from .traced import FAKE, close, compiled, same, session

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FOLDED = {**FAKE, "parameters": "checked"}
PLAIN = {**FAKE, "fold_constants": False}
CHECKED = {**PLAIN, "parameters": "checked"}
VERSION = {**PLAIN, "parameters": "version"}
COPIED = {**PLAIN, "parameters": "copied"}


class Layer(nn.Module):
    """A weight, a bias and a buffer, in operators that the fake device has."""

    def __init__(self, columns=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, columns))
        self.bias = nn.Parameter(torch.randn(columns))
        self.register_buffer("scale", torch.rand(columns) + 0.5)

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight) * self.scale

    @property
    def nbytes(self):
        return sum(t.nbytes for t in (self.weight, self.bias, self.scale))


def run(function, *args):
    with torch.no_grad():
        return function(*args)


def copied_in(fake, function, *args):
    """Run once more and return the bytes that this copied in; the result is checked against eager PyTorch."""
    before = fake.runtime.copied_in
    same(run(function, *args), run(function._orig_mod, *args))
    return fake.runtime.copied_in - before


def use(**options):
    return session(**options).memory_use()[session(**options).target.device]


# -- parameters


@pytest.mark.parametrize("options", [CHECKED, VERSION])
def test_after_the_first_call_only_inputs_are_copied(fake, options):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **options)
    assert copied_in(fake, function, x) == x.nbytes + model.nbytes
    for _ in range(3):
        assert copied_in(fake, function, torch.randn(5, 4)) == x.nbytes


def test_parameters_can_be_copied_at_every_call(fake):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **COPIED)
    for _ in range(3):
        assert copied_in(fake, function, x) == x.nbytes + model.nbytes
    assert use(**COPIED).by_purpose.get("parameters", 0) == 0


def test_results_are_copied_once_per_call(fake):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **CHECKED)
    copied_in(fake, function, x)
    before = fake.runtime.copied_out
    copied_in(fake, function, x)
    assert fake.runtime.copied_out - before == 5 * 6 * 4


def test_an_input_that_several_segments_read_is_copied_once(fake):
    function = lambda x, y: torch.sin(torch.relu(x) + y) + x + y  # sin runs elsewhere
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    function = compiled(function, **FAKE)
    run(function, x, y)
    assert session(**FAKE).reports[-1].fallbacks
    before = fake.runtime.copied_in
    run(function, x, y)
    assert fake.runtime.copied_in - before == x.nbytes + y.nbytes + 3 * 4 * 4  # and what sin gave


def in_place(model):
    with torch.no_grad():
        model.weight.add_(1.0)


def one_element(model):
    with torch.no_grad():
        model.weight[3, 5] += 7.0


def loaded(model):
    model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()})


def loaded_and_assigned(model):
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def stepped(model):
    model.weight.grad = torch.randn_like(model.weight)
    torch.optim.SGD([model.weight], lr=0.1).step()


def stepped_by_foreach(model):
    model.weight.grad, model.bias.grad = torch.randn_like(model.weight), torch.randn_like(model.bias)
    torch.optim.Adam([model.weight, model.bias], lr=0.1, foreach=True).step()


def another_parameter(model):
    model.weight = nn.Parameter(torch.randn_like(model.weight))


def other_data(model):
    model.weight.data = torch.randn_like(model.weight)


def swapped(model):
    torch.utils.swap_tensors(model.bias, nn.Parameter(torch.randn_like(model.bias)))


def set_on_other_memory(model):
    with torch.no_grad():
        model.weight.set_(torch.randn_like(model.weight))


def buffer_in_place(model):
    model.scale.mul_(2.0)


def another_buffer(model):
    model.scale = torch.rand_like(model.scale)


def written_through_data(model):
    model.weight.data.add_(1.0)


def initialized_through_data(model):
    nn.init.normal_(model.weight.data)


def written_through_numpy(model):
    model.weight.detach().numpy()[2, 3] += 1.0


def written_through_a_detached_copy_of_its_storage(model):
    torch.empty(0).set_(model.weight.untyped_storage()).mul_(2.0)


def one_bit(model):
    model.weight.detach().numpy().view(np.uint32)[0, 0] ^= 1 << 22


def two_swapped(model):
    values = model.bias.detach().numpy()
    values[[0, 5]] = values[[5, 0]]


SEEN_BY_VERSION = [
    in_place, one_element, loaded, loaded_and_assigned, stepped, stepped_by_foreach, another_parameter, other_data,
    swapped, set_on_other_memory, buffer_in_place, another_buffer,
]  # fmt: skip
SEEN_BY_CONTENT = [
    written_through_data, initialized_through_data, written_through_numpy,
    written_through_a_detached_copy_of_its_storage, one_bit, two_swapped,
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "change"),
    [
        *((CHECKED, change) for change in (*SEEN_BY_VERSION, *SEEN_BY_CONTENT)),
        *((VERSION, change) for change in SEEN_BY_VERSION),
        *((COPIED, change) for change in (*SEEN_BY_VERSION, *SEEN_BY_CONTENT)),
    ],
    ids=lambda value: value["parameters"] if isinstance(value, dict) else value.__name__,
)
def test_every_way_to_change_a_parameter_is_seen(fake, options, change):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **options)
    copied_in(fake, function, x)
    for _ in range(2):
        before = run(model, x)
        change(model)
        copied_in(fake, function, x)
        assert not torch.equal(run(model, x), before)
    copied_in(fake, function, x)


def test_what_has_not_changed_is_not_copied_again(fake):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **CHECKED)
    copied_in(fake, function, x)
    one_element(model)
    assert copied_in(fake, function, x) == x.nbytes + model.weight.nbytes
    with torch.no_grad():
        model.bias.add_(0.0)  # a new version, the same bytes
    assert copied_in(fake, function, x) == x.nbytes


def test_without_a_compiler_parameters_are_copied_at_every_call(fake, monkeypatch):
    monkeypatch.setattr("kagent_core.execute.agent.memory_watch", lambda cache_dir: None)
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **CHECKED)
    for change in (written_through_data, in_place):
        assert copied_in(fake, function, x) == x.nbytes + model.nbytes
        change(model)
        assert copied_in(fake, function, x) == x.nbytes + model.nbytes


def test_shapes_share_parameters(fake):
    model = Layer()
    function = compiled(model, **CHECKED)
    copied_in(fake, function, torch.randn(5, 4))
    for rows in (2, 9):
        x = torch.randn(rows, 4)
        assert copied_in(fake, function, x) == x.nbytes
    assert use(**CHECKED).by_purpose["parameters"] == model.nbytes


@pytest.mark.parametrize("options", [CHECKED, VERSION])
def test_backward_graphs_share_the_parameters_of_forward_graphs(fake, options):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6), nn.Linear(6, 3)
    model, twin = nn.Sequential(first, nn.ReLU(), second), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    twin.load_state_dict(model.state_dict())
    function = compiled(model, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for _ in range(4):
        x = torch.randn(5, 4)
        for m, optimizer in zip((function, twin), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert use(**options).by_purpose["parameters"] == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("options", [CHECKED, VERSION])
def test_a_parameter_that_a_graph_writes_on_the_device(fake, options):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **options)

    def step(by):
        model.weight.mul_(by)
        model.scale.add_(model.scale)
        return torch.relu(model.weight)

    written = compiled(step, **options)
    copied_in(fake, function, x)
    for by in (2.0, 0.5):
        want = model.weight.detach() * by, model.scale * 2
        with torch.no_grad():
            same(written(torch.tensor(by)), torch.relu(want[0]))
        same((model.weight.detach(), model.scale), want)
        copied_in(fake, function, x)
    assert not session(**options).reports[-1].fallbacks


def test_parameters_that_share_memory(fake):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.randn(4, 4))
            self.two = nn.Parameter(self.one.data[:2])  # a part of it

        def forward(self, x):
            return torch.mm(torch.mm(x, self.one), torch.mm(self.one, torch.relu(self.one))) + self.two[0]

    model, x = Tied(), torch.randn(5, 4)
    function = compiled(model, **CHECKED)
    copied_in(fake, function, x)
    model.one.data.mul_(1.5)
    copied_in(fake, function, x)
    assert copied_in(fake, function, x) == x.nbytes


def test_parameters_that_are_strided_empty_or_without_dimensions(fake):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(6, 4).t())
            self.every_other = nn.Parameter(torch.randn(12)[1::2])
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0, 6))

        def forward(self, x):
            return torch.addmm(self.every_other, x, self.transposed) * self.scalar, torch.relu(self.empty)

    model, x = Odd(), torch.randn(5, 4)
    function = compiled(model, **CHECKED)
    copied_in(fake, function, x)
    assert copied_in(fake, function, x) == x.nbytes
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
        copied_in(fake, function, x)


def test_a_parameter_written_while_it_is_copied_is_copied_again(fake, monkeypatch):
    """Its bytes change after the fingerprint was taken, and change back after the copy."""
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **CHECKED)
    copied_in(fake, function, x)
    in_place(model)
    values, copy = model.weight.detach().numpy(), model_parameters.Uploads._copy
    kept = values.copy()

    def meanwhile(uploads, number, tensor):
        values[:] = 0.0
        copy(uploads, number, tensor)

    monkeypatch.setattr(model_parameters.Uploads, "_copy", meanwhile)
    run(function, x)
    monkeypatch.undo()
    values[:] = kept
    copied_in(fake, function, x)


@pytest.mark.parametrize("device", ["cpu", "fake:0"])
@pytest.mark.parametrize("options", [CHECKED, VERSION])
def test_an_optimizer_that_is_compiled(fake, options, device):
    """Kernels write parameters without PyTorch's knowledge; whoever calls them counts the version up."""
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="kagent", options={"device": device})
    for _ in range(3):
        copied_in(fake, function, x)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        before = model.weight.detach().clone()
        step()
        assert not torch.equal(model.weight, before)
    copied_in(fake, function, x)


@pytest.mark.parametrize("options", [CHECKED, VERSION])
@pytest.mark.parametrize("device", ["cpu", "fake:0"])
def test_an_operator_that_writes_a_parameter(fake, options, device):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **options)
    copied_in(fake, function, x)
    before = model.weight.detach().clone()
    with torch.no_grad():
        kagent_core.run_op("aten::add_.Tensor", model.weight, torch.ones(6), device=device)
    same(model.weight.detach(), before + 1.0)
    copied_in(fake, function, x)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_copy_that_fails_is_told_and_made_at_the_next_call(nth):
    fake = FakeDevice(runtime=FakeRuntime(faults={"copy_in": nth}))
    with kagent_core.use_plugin(fake):
        model, x = Layer(), torch.randn(5, 4)
        function = compiled(model, **CHECKED)
        with pytest.raises(ExecutionError, match=r"for [a-z]+ .aten::.* failed with FakeFaultError"):
            run(function, x)
        copied_in(fake, function, x)
        assert copied_in(fake, function, x) == x.nbytes


def test_each_device_has_the_parameters_that_it_reads():
    fake = FakeDevice(count=2)
    options = {**CHECKED, "placement": {"aten::mul.Tensor": "fake:1"}}
    with kagent_core.use_plugin(fake):
        model, x = Layer(), torch.randn(5, 4)
        function = compiled(model, **options)
        for change in (in_place, buffer_in_place, written_through_data):
            copied_in(fake, function, x)
            change(model)
        copied_in(fake, function, x)
        found = {str(d): use.by_purpose["parameters"] for d, use in session(**options).memory_use().items()}
        assert found == {"fake:0": model.weight.nbytes + model.bias.nbytes, "fake:1": model.scale.nbytes}


# -- what is gone


def test_nothing_is_left_when_the_model_is_gone(fake):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **CHECKED)
    copied_in(fake, function, x)
    assert fake.runtime.live > 0
    del model, function
    torch._dynamo.reset()
    gc.collect()
    session(**CHECKED).close_abandoned()
    assert fake.runtime.live == 0
    assert use(**CHECKED).in_use_nbytes == use(**CHECKED).cached_nbytes == 0


@pytest.mark.usefixtures("only_new_garbage")
def test_memory_of_parameters_that_are_gone_is_used_again(fake):
    model, x = Layer(), torch.randn(5, 4)
    function = compiled(model, **CHECKED)
    copied_in(fake, function, x)
    live = fake.runtime.live
    for _ in range(5):
        for name in ("weight", "bias"):
            setattr(model, name, nn.Parameter(torch.randn_like(getattr(model, name))))
        model.weight.data = torch.randn(4, 6)
        copied_in(fake, function, x)
        gc.collect()
        assert use(**CHECKED).by_purpose["parameters"] == model.nbytes
    assert fake.runtime.live <= live + 2


class Scaled(Layer):
    """What it multiplies with depends on parameters only."""

    def forward(self, x):
        return torch.mm(x, self.weight * self.scale)


def test_what_is_computed_from_parameters_is_copied_once(fake):
    model, x = Scaled(), torch.randn(5, 4)
    function = compiled(model, **FOLDED)

    def call():
        before = fake.runtime.copied_in
        torch.testing.assert_close(run(function, x), run(model, x))
        return fake.runtime.copied_in - before

    first = call()
    assert first > x.nbytes
    assert call() == x.nbytes
    for change in (written_through_data, buffer_in_place):
        change(model)
        assert first == call()
        gc.collect()
        assert call() == x.nbytes
    assert use(**FOLDED).by_purpose["parameters"] < 2 * model.nbytes


def test_constants_of_a_graph_are_copied_once(fake):
    weight, x = torch.randn(4, 6), torch.randn(5, 4)
    with FakeTensorMode() as mode:
        inside = mode.from_tensor(weight)
        graph_module = make_fx(lambda x: (torch.mm(x, inside),), tracing_mode="fake")(mode.from_tensor(x))
    assert [node.op for node in graph_module.graph.nodes].count("get_attr") == 1
    for node in graph_module.graph.find_nodes(op="get_attr"):
        setattr(graph_module, node.target, weight)
    graph = CompiledGraph(session(**CHECKED), CapturedGraph(graph_module, "constant"))
    for call in range(3):
        before = fake.runtime.copied_in
        same(graph([x]), x @ weight)
        assert fake.runtime.copied_in - before == x.nbytes + (weight.nbytes if call == 0 else 0)
    weight.numpy()[0, 0] = 9.0
    same(graph([x]), x @ weight)
    close(graph)


# -- a limit


class SmallRuntime(FakeRuntime):
    """Has so many bytes, and says so only by refusing."""

    def __init__(self, nbytes):
        super().__init__()
        self.left = nbytes

    def allocate(self, nbytes):
        if nbytes > self.left:
            raise MemoryError("the device is full")
        self.left -= nbytes
        return super().allocate(nbytes)

    def free(self, buffer):
        super().free(buffer)
        self.left += len(buffer.data)


@pytest.fixture(params=["limit", "driver"])
def short(request):
    """A device that has too little memory, by a limit or in fact: a function of the bytes gives the options."""
    made = []

    def of(nbytes):
        plugin = FakeDevice(runtime=SmallRuntime(1 << 40 if request.param == "limit" else nbytes))
        block = kagent_core.use_plugin(plugin)
        block.__enter__()
        made.append(block)
        options = {**CHECKED, "device_memory_limit": nbytes} if request.param == "limit" else CHECKED
        return plugin, options

    yield of
    for block in made:
        block.__exit__(None, None, None)


def need_of(model, x):
    """The bytes that a call of a model takes on a device."""
    fake = FakeDevice()
    with kagent_core.use_plugin(fake):
        copied_in(fake, compiled(model, **CHECKED), x)
        need = use(**CHECKED)
    torch._dynamo.reset()
    assert need.peak_nbytes == need.in_use_nbytes
    return need.in_use_nbytes


def test_plans_that_idle_make_room_and_run_again(short):
    models, x = [Layer(48) for _ in range(4)], torch.randn(16, 4)
    need = need_of(models[0], x)
    fake, options = short(int(2.5 * need))
    functions = [compiled(model, **options) for model in models]
    for _ in range(3):
        for function in functions:
            copied_in(fake, function, x)
            assert use(**options).in_use_nbytes <= 2.5 * need
    for model, function in zip(models, functions, strict=True):
        written_through_data(model)
        copied_in(fake, function, x)


def test_what_fits_is_not_given_up(short):
    models, x = [Layer(48) for _ in range(2)], torch.randn(16, 4)
    fake, options = short(int(2.5 * need_of(models[0], x)))
    functions = [compiled(model, **options) for model in models]
    for function in functions:
        copied_in(fake, function, x)
    for function in functions:
        assert copied_in(fake, function, x) == x.nbytes


def test_what_idles_longest_goes_first(short):
    models, x = [Layer(48) for _ in range(3)], torch.randn(16, 4)
    fake, options = short(int(2.5 * need_of(models[0], x)))
    one, two, three = (compiled(model, **options) for model in models)
    for function in (one, two, one, three):
        copied_in(fake, function, x)
    allocated = fake.runtime.calls["allocate"]
    copied_in(fake, one, x)
    assert fake.runtime.calls["allocate"] == allocated, "the arena of the first is still there"


def test_a_plan_that_does_not_fit_says_what_is_needed_and_the_next_call_is_right(short):
    model, x = Layer(48), torch.randn(16, 4)
    fake, options = short(need_of(model, x))
    function = compiled(model, **options)
    copied_in(fake, function, x)
    big = torch.randn(400, 4)
    for _ in range(2):
        with pytest.raises(ExecutionError) as caught:
            run(function, big)
        told = str(caught.value)
        assert f"fake:0 gave no {big.nbytes} bytes for the inputs of " in told or "for the intermediates of " in told
        assert "in use" in told
        assert "cached" in told
        assert ("the limit is" in told) == ("device_memory_limit" in options)
        assert "device_memory_limit" in caught.value.hint
    copied_in(fake, function, x)
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_failure_for_want_of_memory_leaves_nothing(short):
    model, x = Layer(48), torch.randn(400, 4)
    fake, options = short(1000)
    function = compiled(model, **options)
    with pytest.raises(ExecutionError):
        run(function, x)
    del model, function
    torch._dynamo.reset()
    gc.collect()
    session(**options).close_abandoned()
    assert fake.runtime.live == 0


def test_parameters_of_plans_that_do_not_run_make_room(short):
    first, second, x = Layer(480), Layer(480), torch.randn(1, 4)
    need = need_of(first, x)
    assert first.nbytes > need / 2
    fake, options = short(need)
    functions = [compiled(model, **options) for model in (first, second)]
    for _ in range(2):
        for function in functions:
            copied_in(fake, function, x)


def test_the_memory_of_the_device_is_the_limit_by_default(fake):
    run(compiled(Layer(), **CHECKED), torch.randn(5, 4))
    assert use(**CHECKED).limit_nbytes is None  # the fake device does not say what it has
    limited = {**CHECKED, "device_memory_limit": "2 KiB"}
    run(compiled(Layer(), **limited), torch.randn(5, 4))
    assert use(**limited).limit_nbytes == 2048


def test_memory_is_told_in_words(fake):
    model, x = Layer(), torch.randn(5, 4)
    run(compiled(model, **CHECKED), x)
    told = str(use(**CHECKED))
    assert f"{model.nbytes} bytes parameters" in told
    assert f"{x.nbytes} bytes inputs" in told
    assert "peak" in told


# -- threads


@pytest.mark.parametrize("options", [CHECKED, VERSION])
def test_threads_share_parameters_and_are_right(options):
    fake = FakeDevice(runtime=FakeRuntime(delay_ms=0.2))
    with kagent_core.use_plugin(fake):
        model = Layer()
        function = compiled(model, **options)
        run(function, torch.randn(5, 4))
        with ThreadPoolExecutor(4) as pool:
            for round_ in range(4):
                if round_ > 1:
                    in_place(model)
                xs = [torch.randn(5, 4) for _ in range(12)]
                for got, x in zip(pool.map(lambda x: run(function, x), xs), xs, strict=True):
                    same(got, run(model, x))
        assert use(**options).by_purpose["parameters"] == model.nbytes


def test_threads_under_a_limit_take_turns_with_the_memory():
    """More programs than there is room for: what runs is never given up, and every result is right."""
    models, x = [Layer(48) for _ in range(6)], torch.randn(16, 4)
    need = need_of(models[0], x)
    fake = FakeDevice(runtime=FakeRuntime(delay_ms=0.1))
    options = {**CHECKED, "device_memory_limit": int(3.5 * need)}
    with kagent_core.use_plugin(fake):
        functions = [compiled(model, **options) for model in models]
        for function in functions:
            copied_in(fake, function, x)
        stop = threading.Event()
        failures = []

        def work(number):
            while not stop.is_set():
                for n in (number, number + 3):
                    given = torch.randn(16, 4)
                    try:
                        same(run(functions[n], given), run(models[n], given))
                    except BaseException as error:  # noqa: BLE001
                        failures.append(error)
                        stop.set()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(1.0)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert use(**options).peak_nbytes <= 3.5 * need
