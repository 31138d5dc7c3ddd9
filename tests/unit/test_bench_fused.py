"""``kagent bench fused``: it compares what computes the same, and its ratios are those of what it measured."""

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kagent_core.bench import fused
from kagent_core.bench.chains import CHAINS, SIZES, Chain
from kagent_core.bench.fused_figures import FusedFigures, RowFigures, geometric_mean
from kagent_core.bench.fused_tables import print_fused
from kagent_core.bench.memory import CallMemory, measure_memory
from kagent_core.bench.timing import Timing
from kagent_core.cli import app
from kagent_core.cli.output import make_console
from kagent_core.errors import KagentError

BY_NAME = {chain.name: chain for chain in CHAINS}


def tiny(chain: Chain) -> Chain:
    """Return a chain on a few elements, with as many dimensions as it has."""
    shapes = {
        size: tuple(min(extent, 4 + position) for position, extent in enumerate(shape))
        for size, shape in chain.shapes.items()
    }
    if chain.name == "rotary":
        shapes = dict.fromkeys(chain.shapes, (1, 2, 3, 8))  # halves of a head
    return replace(chain, shapes=shapes)


def inputs(chain: Chain) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return chain.make_inputs(tiny(chain).shapes["small"], chain.dtype)


def printed(figures: FusedFigures, width: int = 100) -> str:
    console = make_console()
    console.file, console.width = (text := io.StringIO()), width
    print_fused(console, figures)
    return text.getvalue()


# -- chains


def test_every_chain_has_every_size() -> None:
    for chain in CHAINS:
        assert list(chain.shapes) == list(SIZES)
        elements = [math.prod(shape) for shape in chain.shapes.values()]
        assert elements == [2**14, 2**20, 2**23], chain.name


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_the_shape_is_that_of_the_largest_argument(chain: Chain) -> None:
    args = inputs(chain)
    assert args[0].shape == tiny(chain).shapes["small"]
    assert max(arg.numel() for arg in args) == args[0].numel()
    assert {arg.dtype for arg in args} == {chain.dtype}


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("silu-mul", lambda x, y: x / (1 + torch.exp(-x)) * y),
        ("rms-norm", lambda x, weight: torch.nn.functional.rms_norm(x, weight.shape, weight, 1e-6)),
        ("transposed", lambda x, y: torch.stack([*x.unbind(-1)], dim=-2) + y),
        ("broadcast", lambda matrix, column, row: torch.outer(column, torch.ones_like(row)) * matrix + row * matrix),
        ("softmax-mask", lambda s, mask: torch.nn.functional.softmax((s / 8).masked_fill(mask < 0, -1e30), -1)),
    ],
)
def test_a_chain_computes_what_its_name_says(name: str, compute: Callable[..., torch.Tensor]) -> None:
    args = inputs(BY_NAME[name])
    torch.testing.assert_close(BY_NAME[name].function(*args), compute(*args))


def test_rotary_turns_pairs_by_an_angle_that_grows_with_the_position() -> None:
    x, cos, sin = inputs(BY_NAME["rotary"])
    turned = BY_NAME["rotary"].function(x, cos, sin)
    half = x.shape[-1] // 2
    before, after = (torch.complex(one[..., :half], one[..., half:]) for one in (x, turned))
    torch.testing.assert_close(after.abs(), before.abs())
    torch.testing.assert_close(after[..., 0, :], before[..., 0, :])
    torch.testing.assert_close((after / before)[0, 0, 2, 0].angle(), torch.tensor(2.0))


def test_twelve_ops_are_twelve() -> None:
    graph = torch.fx.experimental.proxy_tensor.make_fx(BY_NAME["twelve-ops"].function)(*inputs(BY_NAME["twelve-ops"]))
    called = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert len(called) == 12


# -- memory


def memory_of(call: Callable[[], object]) -> CallMemory:
    return measure_memory({"it": call})["it"]


def test_memory_is_what_lives_at_the_same_time() -> None:
    x = torch.ones(1000)
    memory = memory_of(lambda: torch.exp(x) + torch.exp(x))
    assert memory == CallMemory(kept_nbytes=0, peak_nbytes=3 * 4000)
    assert memory_of(lambda: x.exp().sin().cos()).peak_nbytes == 2 * 4000
    assert memory_of(lambda: x.view(10, 100)) == CallMemory(0, 0)


def test_what_is_kept_between_calls_counts() -> None:
    x, arena = torch.ones(1000), list[torch.Tensor]()

    def call() -> torch.Tensor:
        if not arena:
            arena.append(torch.empty(500))
        return x + 1

    memory = memory_of(call)
    assert memory.kept_nbytes == 2000
    assert 4000 <= memory.peak_nbytes < 4100  # the number 1 becomes a tensor
    assert memory.nbytes == memory.kept_nbytes + memory.peak_nbytes


def test_the_arena_of_a_plan_is_seen() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(torch.cumsum(x, 0), 0)

    options: dict[str, Any] = {"device": "cpu", "generated_kernels": "off"}
    compiled, x = torch.compile(function, backend="kagent", options=options), torch.ones(1 << 14)
    with torch.no_grad():
        memory = memory_of(lambda: compiled(x))
    assert memory.kept_nbytes == memory.peak_nbytes == x.nbytes


# -- figures


def row(chain: str, times: dict[str, float], first_ms: dict[str, float], nbytes: dict[str, int]) -> RowFigures:
    return RowFigures(
        chain,
        "small",
        (16, 1024),
        "float32",
        {name: Timing(time, 2 * time) for name, time in times.items()},
        first_ms,
        {name: CallMemory(0, size) for name, size in nbytes.items()},
        {} if "inductor" in times else {"inductor": "InvalidCxxCompiler: no compiler"},
    )


WINS = row(
    "wins",
    {"eager": 4000.0, "inductor": 2000.0, "kagent": 1000.0},
    {"inductor": 102.0, "kagent": 11.0},
    {"eager": 3000, "inductor": 1000, "kagent": 1001},
)
LOSES = row(
    "loses",
    {"eager": 2000.0, "inductor": 16000.0, "kagent": 4000.0},
    {"inductor": 116.0, "kagent": 54.0},
    {"eager": 3000, "inductor": 1000, "kagent": 3000},
)
ALONE = row("alone", {"eager": 1000.0, "kagent": 4000.0}, {"kagent": 14.0}, {"eager": 3000, "kagent": 1000})
MACHINE = {"processor": "Abacus 8", "threads": 1, "torch": "2.9.0", "python": "3.11.0"}


def figures(*rows: RowFigures) -> FusedFigures:
    return FusedFigures(MACHINE, 10, rows, 12.34)


def test_ratios_are_kagents_over_the_peers_by_the_minima() -> None:
    assert (WINS.ratio("eager"), WINS.ratio("inductor"), WINS.best_ratio) == (0.25, 0.5, 0.5)
    assert (LOSES.ratio("eager"), LOSES.ratio("inductor"), LOSES.best_ratio) == (2.0, 0.25, 2.0)
    assert (ALONE.ratio("eager"), ALONE.ratio("inductor"), ALONE.best_ratio) == (4.0, None, 4.0)


def test_compiling_is_the_first_call_less_another() -> None:
    assert (WINS.compile_ms("inductor"), WINS.compile_ms("kagent"), WINS.compile_ratio) == (100.0, 10.0, 0.1)
    assert (ALONE.compile_ms("inductor"), ALONE.compile_ms("kagent"), ALONE.compile_ratio) == (None, 10.0, None)


def test_means_are_geometric_and_over_the_rows_that_have_a_ratio() -> None:
    means = figures(WINS, LOSES, ALONE).means()
    assert means["eager"] == pytest.approx(2 ** (1 / 3))
    assert means["inductor"] == pytest.approx(math.sqrt(0.125))
    assert means["best"] == pytest.approx(4 ** (1 / 3))
    assert means["compile"] == pytest.approx(math.sqrt(0.1 * 0.5))
    assert means["memory"] == pytest.approx(math.sqrt(1.001 * 3))
    assert geometric_mean([None]) is None
    assert figures(ALONE).means()["inductor"] is None


def test_aims_are_held_against_the_worst_row() -> None:
    aims = figures(WINS, LOSES).aims()
    assert [aim.case for aim in aims] == ["loses small", "2 rows", "loses small", "loses small"]
    assert [aim.measured for aim in aims] == pytest.approx([2.0, 1.0, 0.5, 3.0])
    assert [aim.met for aim in aims] == [False] * 4
    assert [aim.met for aim in figures(WINS).aims()] == [True] * 4
    assert [aim.case for aim in figures(ALONE).aims()] == ["alone small", "1 rows"]


def test_the_tables_have_every_row() -> None:
    text = printed(figures(WINS, LOSES, ALONE))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "wins small 4.00 / 8.00 2.00 / 4.00 1.00 / 2.00 0.25 0.50 0.50" in lines
    assert "alone small 1.00 / 2.00 - 4.00 / 8.00 4.00 - 4.00" in lines
    assert "geometric mean 1.26 0.35 1.59" in lines
    assert "loses 16x1024 100 50 0.50 1000 B 2.9 KiB 3.00" in lines
    assert "alone 16x1024 - 10 - - 1000 B -" in lines
    assert "inductor could not compile alone small: InvalidCxxCompiler: no compiler" in text
    assert "so that below 1 kagent is faster" in " ".join(text.split())


def test_a_reason_that_every_row_has_is_told_once() -> None:
    text = printed(figures(ALONE, replace(ALONE, chain="other")))
    assert text.count("no compiler") == 1
    assert "could not compile every row" in text


# -- measuring


def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make inductor a backend that fails, as it does without a C++ compiler: it compiles for many seconds."""

    def broken(graph: Any, args: Any) -> Any:
        raise RuntimeError("there is no compiler")

    enter = fused._Compilers.__enter__

    def enter_without(self: fused._Compilers) -> fused._Compilers:
        enter(self)
        self._arguments["inductor"] = {"backend": broken}
        return self

    monkeypatch.setattr(fused._Compilers, "__enter__", enter_without)


@pytest.mark.parametrize("chains", [pytest.param(CHAINS, marks=pytest.mark.nightly), CHAINS[::4]], ids=["all", "some"])
def test_the_command_measures_prints_and_writes(
    chains: list[Chain], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_inductor(monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(fused, "CHAINS", [tiny(chain) for chain in chains])
    monkeypatch.setattr(fused, "MOST_CALLS", 2)
    path = tmp_path / "figures.json"
    arguments = ["bench", "fused", "--sizes", "middle", "--rounds", "2", "--json", str(path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    for chain in chains:
        assert [line[1] for line in lines if line[:1] == [chain.name]] == [
            "middle",
            "x".join(map(str, tiny(chain).shapes["middle"])),
        ]
    assert any(line[:2] == ["geometric", "mean"] for line in lines)
    assert "inductor could not compile every row: RuntimeError: there is no compiler" in result.output
    written = json.loads(path.read_text())
    assert written["rounds"] == 2
    assert written["machine"]["threads"] == 1
    assert [one["chain"] for one in written["rows"]] == [chain.name for chain in chains]
    for one in written["rows"]:
        assert list(one["per_call"]) == ["eager", "kagent"]
        assert one["ratios"]["inductor"] is None
        assert one["ratios"]["best"] == one["ratios"]["eager"]
        assert one["memory"]["kagent"]["peak_nbytes"] > 0


@pytest.mark.slow
def test_inductor_is_a_contender_where_it_can_compile() -> None:
    [one] = fused.measure(make_console(), [tiny(BY_NAME["gelu"])], ["small"], rounds=2).rows
    assert {*one.per_call, *one.unavailable} == {"eager", "kagent", "inductor"}
    assert set(one.unavailable) <= {"inductor"}
    assert one.memory.keys() == one.per_call.keys()
    for name in one.first_call_ms:
        assert one.memory[name].peak_nbytes == 4 * math.prod(one.shape)


def test_rows_and_sizes_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], list[str], int]] = []

    def measure(console: Any, chains: list[Chain], sizes: list[str], rounds: int) -> FusedFigures:
        asked.append(([chain.name for chain in chains], sizes, rounds))
        return figures(WINS)

    monkeypatch.setattr(fused, "measure", measure)
    console = make_console()
    console.file = io.StringIO()
    fused.run(console, "silu-*, gelu", "large,small", 3, None)
    fused.run(console, None, None, 4, None)
    assert asked[0] == (["gelu", "silu-mul", "silu-mul-bf16"], ["small", "large"], 3)
    assert asked[1] == ([chain.name for chain in CHAINS], list(SIZES), 4)


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        ("gelu,rotari", None, "--rows names 'rotari', which is no row; did you mean 'rotary'?"),
        (None, "tiny-*", "--sizes names 'tiny-*', which is no size"),
    ],
)
def test_an_unknown_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch, rows: str | None, sizes: str | None, message: str
) -> None:
    monkeypatch.setattr(fused, "measure", lambda *args: pytest.fail("measured"))
    with pytest.raises(KagentError) as caught:
        fused.run(make_console(), rows, sizes, 1, None)
    assert caught.value.message.startswith(message)


def test_a_file_that_cannot_be_written_is_told_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fused, "measure", lambda *args: pytest.fail("measured"))
    with pytest.raises(KagentError, match="cannot write"):
        fused.run(make_console(), None, None, 1, tmp_path / "nowhere" / "figures.json")


def test_a_wrong_result_is_an_error_that_names_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    without_inductor(monkeypatch)

    def another_while_compiling(x: torch.Tensor) -> torch.Tensor:
        return x + (1e-3 if torch.compiler.is_compiling() else 0.0)

    chain = replace(tiny(BY_NAME["gelu"]), name="odd", function=another_while_compiling)
    with pytest.raises(KagentError, match="kagent computes row 'odd middle' wrong: Tensor-likes are not close"):
        fused.measure(make_console(), [chain], ["middle"], rounds=1)


@pytest.mark.parametrize(("error", "passes"), [(2**-8, True), (2**-5, False), (math.nan, False)])
def test_half_types_may_be_as_far_from_the_truth_as_eager(error: float, passes: bool) -> None:
    """Here eager is 2**-8 off, on the other side."""
    exact = torch.full((4,), 1.0, dtype=torch.float64)
    eager, result = (torch.full((4,), value, dtype=torch.bfloat16) for value in (1 - 2**-8, 1 + error))
    chain = Chain("one", lambda x: exact if x.dtype == torch.float64 else eager, lambda shape, dtype: (), {})
    chain = replace(chain, dtype=torch.bfloat16)

    def check() -> None:
        fused._check("one small", chain, (torch.ones(4, dtype=torch.bfloat16),), {"kagent": lambda: result})

    if passes:
        check()
    else:
        with pytest.raises(KagentError, match="kagent computes row 'one small' wrong"):
            check()


def test_a_result_of_another_dtype_is_wrong() -> None:
    chain = Chain("one", lambda x: x, lambda shape, dtype: (), {}, torch.bfloat16)
    x = torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(KagentError, match="row 'one small' wrong: The values for attribute 'dtype' do not match"):
        fused._check("one small", chain, (x,), {"kagent": x.float})
