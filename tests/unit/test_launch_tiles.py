"""Tile sizes as part of launch configs: spelling, errors, which ones are taken, what they change."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import kagent_core
from kagent_core import hookimpl
from kagent_core.codegen.generic.tiles import DEFAULT_TILES
from kagent_core.config import Config, load_config
from kagent_core.errors import ConfigError, LaunchConfigError
from kagent_core.extract.context import ExtractionContext
from kagent_core.extract.launch_choice import ForcedLaunchConfig, choose_launch_config, choose_tiles
from kagent_core.kernels import force_launch_config
from kagent_core.profile.agent import ProfilerAgent
from kagent_core.profile.problem import problem_key
from kagent_core.session import session_for
from kagent_core.specs import Device, DeviceInfo, KernelDescriptor, LaunchConfig, OpCall, Program
from kagent_core.specs.tiles import GREATEST, TileChoice

from ..codegen_programs import generator, kernels, listed, program, source_of, text_of
from .builders import call, tensor

aten = torch.ops.aten
TOY = DeviceInfo(Device("toy", 0), "Toy 3000", max_threads_per_block=1024)
SMALL = LaunchConfig(tiles={"rows": 4, "columns": 16})
OTHER = LaunchConfig(tiles={"rows": 2})
LAUNCHED = LaunchConfig((2, 1, 1), (8, 1, 1), tiles={"depth": 32})

# -- as data


def test_tiles_are_sorted_hashable_and_readable() -> None:
    assert LaunchConfig(tiles=(("rows", 4), ("columns", 16))) == SMALL
    assert hash(LaunchConfig(tiles=SMALL.tiles)) == hash(SMALL)
    assert LaunchConfig() != SMALL
    assert str(SMALL) == "tiles: columns=16,rows=4"
    assert str(LAUNCHED) == "grid (2, 1, 1) x block (8, 1, 1), tiles: depth=32"
    assert SMALL.has_only_tiles
    assert not LAUNCHED.has_only_tiles
    assert not LaunchConfig().has_only_tiles


@pytest.mark.parametrize(
    ("tiles", "message", "hint"),
    [
        ({"row": 4}, "there is no tile size 'row', expected 'block_columns', 'block_depth', ", "did you mean 'rows'?"),
        ({"zzz": 4}, "there is no tile size 'zzz', expected", "see docs/launch-configs.md"),
        ({"rows": 0}, "the tile size 'rows' is 0, expected a whole number from 1 to 64", "leave it out"),
        ({"rows": -8}, "the tile size 'rows' is -8, expected a whole number from 1 to 64", "leave it out"),
        ({"rows": 65}, "the tile size 'rows' is 65, expected a whole number from 1 to 64", "leave it out"),
        ({"rows": 4.0}, "the tile size 'rows' is 4.0, expected a whole number", "leave it out"),
        ({"rows": True}, "the tile size 'rows' is True, expected a whole number", "leave it out"),
        ({"columns": 12}, "the tile size 'columns' is 12, expected a power of two", "take 8 or 16"),
        (
            {"block_rows": 48},
            "the tile size 'block_rows' is 48, expected a power of two, since it is dealt",
            "take 32 or 64",
        ),
        ({"lanes": 1000}, "the tile size 'lanes' is 1000, expected a power of two", "take 512 or 1024"),
    ],
)
def test_what_is_no_tile_size_is_refused(tiles: Any, message: str, hint: str) -> None:
    with pytest.raises(LaunchConfigError) as caught:
        LaunchConfig(tiles=tiles)
    assert caught.value.message.startswith(message)
    assert (caught.value.hint or "").startswith(hint)


def test_every_tile_size_is_one_of_the_generators() -> None:
    for name in GREATEST:
        assert DEFAULT_TILES.with_sizes(((name, 1),)) != DEFAULT_TILES


# -- in config


def test_config_takes_them_as_text_and_spells_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "aten::mm=tiles: rows=4, columns=16;aten::bmm=2,1,1/8,1,1/64 tiles: depth=32;my_add=8,1,1/256,1,1"
    config = Config(launch_configs=text)
    assert config.launch_configs["aten::mm"] == SMALL
    assert config.launch_configs["aten::bmm"] == LaunchConfig((2, 1, 1), (8, 1, 1), 64, {"depth": 32})
    assert config.as_dict()["launch_configs"] == {
        "aten::mm": "tiles: columns=16,rows=4",
        "aten::bmm": "2,1,1/8,1,1/64 tiles: depth=32",
        "my_add": "8,1,1/256,1,1",
    }
    assert Config(**json.loads(json.dumps(config.as_dict()))) == config
    monkeypatch.setenv("KAGENT_LAUNCH_CONFIGS", str(config.launch_configs))
    assert load_config().launch_configs == config.launch_configs


@pytest.mark.parametrize(
    ("spelled", "message", "hint"),
    [
        (
            "tiles: row=4",
            "there is no tile size 'row', expected 'block_columns', 'block_depth'",
            "did you mean 'rows'?",
        ),
        ("tiles: rows=-1", "the tile size 'rows' is -1, expected a whole number from 1 to 64", "leave it out"),
        ("tiles: columns=12", "expected a power of two", "take 8 or 16"),
        ("tiles: rows", "with 'rows', expected tile sizes as NAME=SIZE pairs", "write them as 'tiles: rows=4,"),
        ("tiles:", "with '', expected tile sizes as NAME=SIZE pairs", "write them as 'tiles: rows=4,"),
        ("tiles: rows=4,rows=8", "with 'rows' twice, expected each tile size once", ""),
        ("4,4/1 tiles: rows=4", "expected a launch config", "tile sizes as 'tiles: rows=4,columns=16'"),
        ("4,4,1/16,0,1 tiles: rows=4", "expected at least one block and one thread in each direction", ""),
    ],
)
def test_misspelt_tiles_are_refused_by_config_and_program(spelled: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(launch_configs={"aten::mm": spelled})
    assert f"has {spelled!r} for 'aten::mm'" in caught.value.message
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    with pytest.raises(LaunchConfigError) as given, force_launch_config("aten::mm", spelled):
        pass
    assert f"the launch config for 'aten::mm' is {spelled!r}" in given.value.message
    assert message in given.value.message


# -- which ones are taken

MM = (call(0, "aten::mm", {"self": tensor(0, 4, 4), "mat2": tensor(1, 4, 4)}, [tensor(2, 4, 4)]),)
GENERATED = KernelDescriptor("aten::mm", "mm_1234", source="", packed=())
OWN = KernelDescriptor("aten::mm", "own")
DERIVED = LaunchConfig(block=(8, 1, 1))


class Deriver:
    """Derives what it is told."""

    def __init__(self, config: LaunchConfig | None = DERIVED) -> None:
        self.config = config

    def derive(self, calls: Any, kernel: Any, info: Any) -> LaunchConfig | None:
        return self.config


def forced(config: LaunchConfig, name: str = "aten::mm") -> dict[str, ForcedLaunchConfig]:
    return {name: ForcedLaunchConfig(name, config)}


def test_forced_tiles_outrank_tuned_ones_and_those_the_devices() -> None:
    assert choose_tiles(MM, {}) == TileChoice()
    assert choose_tiles(MM, {}, OTHER) == TileChoice((("rows", 2),), "suggested")
    assert choose_tiles(MM, forced(SMALL), OTHER) == TileChoice((("columns", 16), ("rows", 4)), "forced")
    # what says nothing about tiles leaves them to the next
    assert choose_tiles(MM, forced(DERIVED), OTHER).source == "suggested"
    assert choose_tiles(MM, forced(SMALL, "aten::bmm"), DERIVED) == TileChoice()
    both = (*MM, call(1, "aten::relu", {"self": tensor(2, 4, 4)}, [tensor(3, 4, 4)]))
    assert choose_tiles(both, forced(SMALL)) == TileChoice()
    assert choose_tiles(both, forced(SMALL, "aten::mm+aten::relu")).source == "forced"


def test_a_kernel_with_forced_tiles_is_launched_as_the_device_derives() -> None:
    force = forced(SMALL)
    choice = choose_launch_config(MM, GENERATED, TOY, Deriver(), LAUNCHED, force)  # type: ignore[arg-type]
    assert (choice.config, choice.source) == (LaunchConfig(block=(8, 1, 1), tiles=SMALL.tiles), "forced")
    assert force["aten::mm"].used
    choice = choose_launch_config(MM, GENERATED, TOY, Deriver(), SMALL)  # type: ignore[arg-type]
    assert (choice.config, choice.source) == (LaunchConfig(block=(8, 1, 1), tiles=SMALL.tiles), "suggested")
    choice = choose_launch_config(MM, GENERATED, TOY, Deriver(), LAUNCHED)  # type: ignore[arg-type]
    assert (choice.config, choice.source) == (LAUNCHED, "suggested")
    choice = choose_launch_config(MM, GENERATED, TOY, Deriver(None), SMALL)  # type: ignore[arg-type]
    assert (choice.config, choice.source) == (None, "derived")


def test_tiles_that_are_forced_on_a_kernel_that_has_none_are_told(caplog: pytest.LogCaptureFixture) -> None:
    force = forced(SMALL)
    choice = choose_launch_config(MM, OWN, TOY, Deriver(), None, force)  # type: ignore[arg-type]
    assert (choice.config, choice.source) == (DERIVED, "derived")
    assert not force["aten::mm"].used
    told = "op_0: kernel 'own' is not generated, so tiles: columns=16,rows=4, which are forced on it, change nothing"
    assert told in caplog.text


def test_a_kernel_that_is_forced_by_name_still_has_the_tiles_of_its_signature() -> None:
    force = forced(SMALL) | forced(LaunchConfig((2, 1, 1)), "mm_1234")
    choice = choose_launch_config(MM, GENERATED, TOY, Deriver(), None, force)  # type: ignore[arg-type]
    assert choice.config == LaunchConfig((2, 1, 1))
    assert all(each.used for each in force.values())


# -- what they change: the text, and nothing else


def convolution(x: torch.Tensor, weight: torch.Tensor) -> Any:
    return aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)


torch.manual_seed(0)
OPERANDS: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor]]] = {
    "mm": (aten.mm, (torch.randn(37, 70), torch.randn(70, 53))),
    "mm_float64": (aten.mm, (torch.randint(9, (5, 300)).double(), torch.randint(9, (300, 19)).double())),
    "dot": (aten.dot, (torch.randn(1000), torch.randn(1000))),
    "convolution": (convolution, (torch.randn(2, 5, 11, 13), torch.randn(7, 5, 3, 3))),
    "attention": (attention, tuple(torch.randn(1, 2, 29, 20) for _ in range(3))),
}
SIZES = [
    {"rows": 1, "columns": 1, "depth": 1, "blocks": 1, "queries": 1, "keys": 1, "lanes": 1},
    {"rows": 3, "columns": 16, "depth": 7, "blocks": 5, "queries": 5, "keys": 6, "lanes": 16},
    {"rows": 64, "columns": 128, "depth": 400, "blocks": 2, "queries": 64, "keys": 100, "lanes": 1024},
]


@pytest.mark.parametrize("sizes", SIZES, ids=["ones", "odd", "larger than the problem"])
def test_tiles_change_the_text_and_not_the_result(sizes: dict[str, int]) -> None:
    tiles = TileChoice(LaunchConfig(tiles=sizes).tiles, "forced")  # type: ignore[arg-type]
    making = generator().with_tiles(lambda calls: tiles)
    for function, args in OPERANDS.values():
        assert text_of(function, *args, making=making) != text_of(function, *args)
    cases = list(OPERANDS.values())
    for made, (function, args) in zip(kernels(cases, making), cases, strict=True):
        exact = listed(function(*(arg.double() for arg in args)))
        for ours, eagers, result in zip(made(*args), listed(function(*args)), exact, strict=True):
            assert (ours.double() - result).norm() <= 2 * (eagers.double() - result).norm(), function


def test_kernels_with_other_tiles_are_other_kernels() -> None:
    choice = {"now": TileChoice()}
    base = generator()
    making = base.with_tiles(lambda calls: choice["now"])
    made: Program = program(aten.mm, torch.empty(9, 9), torch.empty(9, 9))
    default = source_of(made, base)
    sources = []
    for tiles in ((), (("rows", 4),), (("rows", 2),), (("rows", 4),)):
        choice["now"] = TileChoice(tiles, "forced")
        sources.append(source_of(made, making))
    assert sources[0].text == default.text
    assert sources[1].text == sources[3].text
    assert len({source.name for source in sources}) == len({source.text for source in sources}) == 3


def test_operators_without_tiles_do_not_ask_for_them() -> None:
    def choose(calls: Sequence[OpCall]) -> TileChoice:
        raise AssertionError

    making = generator().with_tiles(choose)
    assert text_of(torch.relu, torch.empty(4), making=making) == text_of(torch.relu, torch.empty(4))


TOO_LARGE = (("blocks", 1024), ("columns", 4096))


def test_tiles_that_no_work_item_has_memory_for_are_an_error() -> None:
    making = generator().with_tiles(lambda calls: TileChoice(TOO_LARGE, "forced"))
    with pytest.raises(LaunchConfigError) as caught:
        text_of(aten.mm, torch.empty(9999, 9), torch.empty(9, 9), making=making)
    assert "the tiles of aten::mm take more than" in caught.value.message
    assert "expected at most 2097152" in caught.value.message
    assert caught.value.hint == "take smaller tile sizes: what they are is in docs/launch-configs.md"


def test_tuned_tiles_that_no_work_item_has_memory_for_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    making = generator().with_tiles(lambda calls: TileChoice(TOO_LARGE, "suggested"))
    args = (torch.empty(9999, 9), torch.empty(9, 9))
    for _ in range(2):
        assert text_of(aten.mm, *args, making=making) == text_of(aten.mm, *args)
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "the tile sizes that were tuned for aten::mm, tiles: blocks=1024,columns=4096, are" in record.getMessage()


# -- kept


def test_tuned_tiles_are_kept_across_processes(tmp_path: Path) -> None:
    path = tmp_path / "profile.sqlite3"
    for config in (SMALL, LAUNCHED, DERIVED):
        with closing(ProfilerAgent(path)) as agent:
            agent.record_config(TOY, "aten::mm", str(config), config, 1.0)
    again = ProfilerAgent(path)
    for config in (SMALL, LAUNCHED, DERIVED):
        assert again.suggest(TOY, "aten::mm", str(config)) == config
    again.record_config(TOY, "aten::mm", str(SMALL), OTHER, 0.5)
    again.close()
    assert ProfilerAgent(path).suggest(TOY, "aten::mm", str(SMALL)) == OTHER


# -- from end to end, on the CPU


class Keep:
    """Keeps every context that was extracted."""

    def __init__(self) -> None:
        self.contexts: list[ExtractionContext] = []

    @hookimpl(wrapper=True)
    def kagent_assemble(self, ctx: ExtractionContext) -> Iterator[Any]:
        tasks = yield
        self.contexts.append(ctx)
        return tasks


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[list[ExtractionContext]]:
    torch._dynamo.reset()
    keep = Keep()
    with kagent_core.use_plugin(keep):
        yield keep.contexts


A, B = torch.randn(19, 30), torch.randn(30, 21)


def compiled(tmp_path: Path, **options: Any) -> Callable[..., torch.Tensor]:
    run: Callable[..., torch.Tensor] = kagent_core.compile(
        lambda a, b: torch.mm(a, b), device="cpu", generated_kernels="all", cache_dir=str(tmp_path), **options
    )
    return run


def sources(kept: list[ExtractionContext]) -> list[str]:
    return [kernel.source or "" for ctx in kept for kernel in ctx.kernels]


def test_a_block_forces_tiles_and_leaves_no_trace(
    kept: list[ExtractionContext], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = compiled(tmp_path)
    wanted = run(A, B)
    with force_launch_config("aten::mm", "tiles: rows=3,depth=8"):
        torch.testing.assert_close(run(A, B), wanted)
    run(A, B)
    first, second = sources(kept)
    assert first != second
    assert "p_first += 8" in second
    choice = kept[1].launch_choices[0]
    assert choice.source == "forced"
    assert choice.config is not None
    assert choice.config.tiles == (("depth", 8), ("rows", 3))
    assert not [record for record in caplog.records if "forced" in record.getMessage()]


def test_forced_configured_tuned_and_default_tiles(kept: list[ExtractionContext], tmp_path: Path) -> None:
    run = compiled(tmp_path)
    wanted = run(A, B)
    [calls] = kept[0].group_calls()
    info = kept[0].opened.info
    tuned = load_config({"device": "cpu", "generated_kernels": "all", "cache_dir": str(tmp_path), "profile": True})
    session_for(tuned).profiler.record_config(info, "aten::mm", problem_key(calls), LaunchConfig(tiles={"depth": 2}), 0)
    both = {"profile": True, "launch_configs": {"aten::mm": "tiles: depth=4"}}
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(tmp_path, profile=True)(A, B), wanted)
    session_for(tuned).profiler.flush()
    torch._dynamo.reset()
    run = compiled(tmp_path, **both)
    torch.testing.assert_close(run(A, B), wanted)
    with force_launch_config("aten::mm", LaunchConfig(tiles={"depth": 8})):
        torch.testing.assert_close(run(A, B), wanted)
    steps = [source.split("p_first += ")[1].split(")")[0] for source in sources(kept)]
    assert steps == ["256", "2", "4", "8"]
    assert [ctx.launch_choices[0].source for ctx in kept] == ["derived", "suggested", "forced", "forced"]


def test_tiles_forced_on_atens_product_are_told(
    kept: list[ExtractionContext], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = kagent_core.compile(lambda a, b: torch.mm(a, b), device="cpu", cache_dir=str(tmp_path))
    with force_launch_config("aten::mm", SMALL):
        run(A, B)
    assert "is not generated, so tiles: columns=16,rows=4, which are forced on it, change nothing" in caplog.text


def test_forced_tiles_that_are_too_large_reach_the_user(kept: list[ExtractionContext], tmp_path: Path) -> None:
    run = compiled(tmp_path)
    with (
        force_launch_config("aten::mm", LaunchConfig(tiles=TOO_LARGE)),
        pytest.raises(LaunchConfigError, match=r"the tiles of aten::mm take more than \d+ bytes of a work-item's own"),
    ):
        run(torch.randn(9999, 9), torch.randn(9, 9))
