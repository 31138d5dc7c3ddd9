"""Launch configs: the shared helpers, which one is chosen, and forcing one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kagent_core
from kagent_core import force_launch_config, hookimpl
from kagent_core.config import Config, LaunchConfigs, config_rows, load_config
from kagent_core.errors import ConfigError, LaunchConfigError
from kagent_core.extract.launch_choice import ForcedLaunchConfig, choose_launch_config
from kagent_core.extract.launch_config import (
    beyond_limits,
    elementwise,
    row_blocks,
    standard_launch_config,
    tiles,
)
from kagent_core.inspect.dump import context_as_dict
from kagent_core.kernels import override
from kagent_core.specs import DeviceInfo, KernelDescriptor, LaunchConfig
from kagent_core.testing.fake import FakeDevice
from kagent_cpu.launch import GRAIN, ChunkDeriver

from .builders import TOY, call, relu, tensor

INFO = DeviceInfo(TOY, "Toy 3000", max_threads_per_block=1024, shared_nbytes=4096)
RELU = KernelDescriptor("aten::relu", "toy_relu")

limits = st.builds(
    DeviceInfo,
    st.just(TOY),
    st.just("Toy 3000"),
    max_threads_per_block=st.integers(1, 1024),
    shared_nbytes=st.sampled_from([0, 1, 100, 4096, 49152]),
    max_grid=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40)),
)


# -- elementwise


def grid_stride(config, elements):
    """The elements that each thread of a grid-stride loop does."""
    threads = config.grid[0] * config.block[0]
    return [range(first, elements, threads) for first in range(threads)]


@given(st.integers(-1, 3000), limits, st.integers(1, 1024), st.integers(1, 8), st.none() | st.integers(1, 20))
def test_elementwise_covers_every_element_once(elements, info, threads, per_thread, max_blocks):
    config = elementwise(elements, info, threads=threads, elements_per_thread=per_thread, max_blocks=max_blocks)
    if elements <= 0:
        assert config is None
        return
    assert beyond_limits(config, info) is None
    assert config.block[0] <= threads
    assert config.grid[0] <= (max_blocks or math.inf)
    done = sorted(itertools.chain.from_iterable(grid_stride(config, elements)))
    assert done == list(range(elements))
    capped = config.grid[0] in (info.max_grid[0], max_blocks)
    assert capped or math.prod((*config.grid, *config.block)) * per_thread >= elements


@pytest.mark.parametrize(
    ("elements", "config"),
    [
        (1, LaunchConfig()),
        (256, LaunchConfig((1, 1, 1), (256, 1, 1))),
        (257, LaunchConfig((2, 1, 1), (256, 1, 1))),
        (10_000_000, LaunchConfig((64, 1, 1), (256, 1, 1))),
    ],
)
def test_elementwise(elements, config):
    assert elementwise(elements, INFO, max_blocks=64) == config


def test_no_block_comes_for_less_than_its_threads_should_do():
    assert elementwise(1000, INFO, elements_per_thread=4) == LaunchConfig((1, 1, 1), (256, 1, 1))
    assert elementwise(1025, INFO, elements_per_thread=4) == LaunchConfig((2, 1, 1), (256, 1, 1))


# -- tiles


@given(
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(0, 3),
    limits,
    st.sampled_from([(16, 16), (32, 8), (5, 7), (64, 64)]),
)
def test_tiles_cover_every_element_once(rows, columns, batch, info, tile):
    needs = min(rows, columns, batch) > 0
    try:
        config = tiles(rows, columns, info, tile=tile, batch=batch)
    except LaunchConfigError:
        assert needs, "nothing to do is no error"
        unbound = tiles(rows, columns, dataclasses.replace(info, max_grid=INFO.max_grid), tile=tile, batch=batch)
        assert "blocks in" in beyond_limits(unbound, info)
        return
    if not needs:
        assert config is None
        return
    assert beyond_limits(config, info) is None
    assert config.block[0] <= tile[0]
    assert config.block[1] <= tile[1]
    across = config.grid[0] * config.block[0]
    down = config.grid[1] * config.block[1]
    assert columns <= across < columns + config.block[0], "no column of blocks has nothing to do"
    assert rows <= down < rows + config.block[1]
    assert config.grid[2] == batch


def test_a_product_is_cut_into_tiles_of_16_by_16():
    assert tiles(33, 100, INFO) == LaunchConfig((7, 3, 1), (16, 16, 1))
    assert tiles(33, 100, INFO, batch=5, shared_nbytes=2048) == LaunchConfig((7, 3, 5), (16, 16, 1), 2048)


@pytest.mark.parametrize(
    ("most", "block"), [(256, (16, 16, 1)), (255, (8, 16, 1)), (64, (8, 8, 1)), (5, (2, 2, 1)), (1, (1, 1, 1))]
)
def test_a_tile_with_too_many_threads_is_halved(most, block):
    info = dataclasses.replace(INFO, max_threads_per_block=most)
    assert tiles(100, 100, info).block == block


def test_more_tiles_than_the_grid_takes_are_refused_with_numbers():
    info = dataclasses.replace(INFO, max_grid=(2**31 - 1, 65535, 65535))
    with pytest.raises(LaunchConfigError) as caught:
        tiles(2_000_000, 16, info)
    assert caught.value.message == (
        "1 matrices of 2000000 x 16 in tiles of 16 x 16 need 125000 blocks in y, toy:0 takes 65535"
    )
    assert caught.value.hint == "let each block loop over several tiles, or take larger ones"


# -- one block per row


@given(st.integers(0, 100), st.integers(0, 5000), limits, st.integers(1, 2048), st.integers(0, 64))
def test_row_blocks_are_powers_of_two_within_the_limits(rows, length, info, max_threads, nbytes):
    config = row_blocks(rows, length, info, max_threads=max_threads, nbytes_per_thread=nbytes)
    if rows == 0:
        assert config is None
        return
    threads = config.block[0]
    assert threads & (threads - 1) == 0
    assert threads <= min(max_threads, info.max_threads_per_block, max(length, 1))
    if threads > 1 or info.shared_nbytes >= nbytes:
        assert beyond_limits(config, info) is None
    assert config.shared_nbytes == threads * nbytes
    assert config.grid == (min(rows, info.max_grid[0]), 1, 1)
    fits = info.shared_nbytes == 0 or 2 * threads * nbytes <= info.shared_nbytes
    if fits:
        assert 2 * threads > min(max_threads, info.max_threads_per_block, max(length, 1)), "twice as many would do"


def test_a_block_reduces_a_row():
    assert row_blocks(10, 100, INFO) == LaunchConfig((10, 1, 1), (64, 1, 1))
    assert row_blocks(10, 100_000, INFO) == LaunchConfig((10, 1, 1), (1024, 1, 1))
    assert row_blocks(10, 100_000, INFO, nbytes_per_thread=8) == LaunchConfig((10, 1, 1), (512, 1, 1), 4096)


def test_the_sum_of_nothing_is_written_all_the_same():
    assert row_blocks(10, 0, INFO) == LaunchConfig((10, 1, 1))


# -- what operators suggest


def product(signature, *shape):
    return call(0, signature, {"self": tensor(0, *shape), "mat2": tensor(1, *shape)}, [tensor(2, *shape)])


def total(number, source, target, dim=(1,)):
    return call(number, "aten::sum.dim_IntList", {"self": source, "dim": dim, "keepdim": True}, [target])


@pytest.mark.parametrize(
    ("calls", "config"),
    [
        ([relu(0, tensor(0, 300), tensor(1, 300))], elementwise(300, INFO)),
        ([relu(0, tensor(0, 0), tensor(1, 0))], None),
        ([call(0, "aten::_assert_async", {"self": tensor(0, 1)})], LaunchConfig()),
        ([product("aten::mm", 33, 33)], tiles(33, 33, INFO)),
        ([product("aten::bmm", 5, 33, 33)], tiles(33, 33, INFO, batch=5)),
        ([product("aten::mm", 0, 0)], None),
        ([total(0, tensor(0, 7, 100), tensor(1, 7, 1))], row_blocks(7, 100, INFO)),
        ([total(0, tensor(0, 7, 100), tensor(1, 1, 100), dim=(0,))], row_blocks(100, 7, INFO)),
        ([total(0, tensor(0, 7, 0), tensor(1, 7, 1))], LaunchConfig((7, 1, 1))),
        ([total(0, tensor(0, 0, 7), tensor(1, 0, 1))], None),
        (
            [relu(0, tensor(0, 7, 100), tensor(1, 7, 100)), total(1, tensor(1, 7, 100), tensor(2, 7, 1))],
            row_blocks(7, 100, INFO),
        ),
    ],
)
def test_operators_suggest_a_launch_config(calls, config):
    assert standard_launch_config(calls, INFO) == config


@pytest.mark.parametrize(
    ("elements", "threads", "chunks"), [(0, 4, 1), (1, 4, 1), (GRAIN, 4, 1), (GRAIN + 1, 4, 2), (GRAIN * 99, 4, 4)]
)
def test_the_cpu_splits_work_into_chunks(elements, threads, chunks):
    config = ChunkDeriver(threads).derive([relu(0, tensor(0, elements), tensor(1, elements))], RELU, INFO)
    assert config == LaunchConfig((chunks, 1, 1))


# -- limits


@pytest.mark.parametrize(
    ("config", "beyond"),
    [
        (LaunchConfig((1, 2, 0)), "every extent must be at least 1"),
        (LaunchConfig(shared_nbytes=-1), "every extent must be at least 1"),
        (LaunchConfig(block=(1024, 2, 1)), "2048 threads per block, toy:0 takes 1024"),
        (
            LaunchConfig(shared_nbytes=5000),
            "5000 bytes of shared memory, toy:0 has 4096 bytes of shared memory per block",
        ),
        (LaunchConfig((1, 1, 70000)), "need 70000 blocks in z, toy:0 takes 65535"),
        (LaunchConfig((2**31 - 1, 65535, 65535), (1024, 1, 1), 4096), None),
    ],
)
def test_limits(config, beyond):
    info = dataclasses.replace(INFO, max_grid=(2**31 - 1, 65535, 65535))
    assert beyond_limits(config, info) == beyond


def test_a_limit_that_is_not_known_is_not_checked():
    assert beyond_limits(LaunchConfig(shared_nbytes=1 << 30), dataclasses.replace(INFO, shared_nbytes=0)) is None


# -- which one is chosen


class Deriver:
    """Gives what the test says, and counts how often it was asked."""

    def __init__(self, config):
        self.config, self.asked = config, 0

    def derive(self, calls, kernel, info):
        self.asked += 1
        return self.config


DERIVED, TUNED, FORCED = (LaunchConfig(block=(n, 1, 1)) for n in (8, 16, 32))
TOO_LARGE = LaunchConfig(block=(4096, 1, 1))
CALLS = (relu(0, tensor(0, 4), tensor(1, 4)),)


def choose(derived=DERIVED, suggested=None, calls=CALLS, kernel=RELU, **forced):
    named = {name.replace("aten_", "aten::"): ForcedLaunchConfig(name, config) for name, config in forced.items()}
    return choose_launch_config(calls, kernel, INFO, Deriver(derived), suggested, named)


def test_the_derived_one_where_there_is_no_other():
    assert choose() == dataclasses.replace(choose(), config=DERIVED, source="derived", derived=DERIVED, suggested=None)


def test_a_suggestion_spares_the_derivation():
    deriver = Deriver(DERIVED)
    choice = choose_launch_config(CALLS, RELU, INFO, deriver, TUNED)
    assert (choice.config, choice.source, choice.derived, choice.suggested) == (TUNED, "suggested", None, TUNED)
    assert deriver.asked == 0


def test_a_suggestion_that_the_device_cannot_launch_is_refused_with_a_warning(caplog):
    choice = choose(suggested=TOO_LARGE)
    assert (choice.config, choice.source, choice.suggested) == (DERIVED, "derived", TOO_LARGE)
    assert choice.refused == "4096 threads per block, toy:0 takes 1024"
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.name == "kagent.extract"
    assert record.getMessage() == (
        f"op_0: the launch config that was tuned for kernel 'toy_relu', {TOO_LARGE}, is not used: {choice.refused}"
    )


@pytest.mark.parametrize(
    "forced", [{"toy_relu": FORCED}, {"aten_relu": FORCED}, {"aten_relu": TUNED, "toy_relu": FORCED}]
)
def test_a_forced_one_comes_first_and_is_compared(forced, caplog):
    with caplog.at_level(logging.DEBUG, "kagent.extract"):
        choice = choose(suggested=TUNED, **forced)
    assert (choice.config, choice.source, choice.derived, choice.suggested) == (FORCED, "forced", DERIVED, TUNED)
    assert f"op_0: kernel 'toy_relu' gets {FORCED}, forced; derived was {DERIVED}" in caplog.text


def test_a_fused_kernel_goes_by_its_signatures():
    calls = (*CALLS, relu(1, tensor(1, 4), tensor(2, 4)))
    forced = {"aten::relu+aten::relu": ForcedLaunchConfig("", FORCED), "aten::relu": ForcedLaunchConfig("", TUNED)}
    kernel = KernelDescriptor("", "both", fuses=("aten::relu", "aten::relu"))
    assert choose_launch_config(calls, kernel, INFO, Deriver(DERIVED), None, forced).config == FORCED


def test_nothing_to_launch_cannot_be_forced():
    choice = choose(derived=None, toy_relu=FORCED)
    assert (choice.config, choice.source) == (None, "derived")


def test_a_forced_one_beyond_a_limit_names_kernel_limit_and_value():
    with pytest.raises(LaunchConfigError) as caught:
        choose(toy_relu=TOO_LARGE)
    assert caught.value.message == (
        f"kernel 'toy_relu' is forced to the launch config {TOO_LARGE}: 4096 threads per block, toy:0 takes 1024"
    )


# -- in config


def test_config_takes_text_and_launch_configs():
    config = Config(
        launch_configs={"aten::mm": "4, 4, 1 / 16, 16, 1", "my_add": LaunchConfig((2, 1, 1), (8, 1, 1), 64)}
    )
    assert config.launch_configs["aten::mm"] == LaunchConfig((4, 4, 1), (16, 16, 1))
    assert config.as_dict()["launch_configs"] == {"aten::mm": "4,4,1/16,16,1", "my_add": "2,1,1/8,1,1/64"}
    assert Config(**json.loads(json.dumps(config.as_dict()))) == config
    assert hash(Config(**config.as_dict())) == hash(config)
    assert repr(config.launch_configs).startswith("LaunchConfigs({'aten::mm': LaunchConfig(")
    assert len(config.launch_configs) == 2


def test_config_reads_it_back_from_the_environment(monkeypatch):
    config = Config(launch_configs={"aten::mm": "4,4,1/16,16,1", "my_add": "2,1,1/8,1,1/64"}, fusion_rules=["views"])
    rows = {row.key: row.value for row in config_rows(config, {})}
    assert rows["launch_configs"] == "aten::mm=4,4,1/16,16,1;my_add=2,1,1/8,1,1/64"
    monkeypatch.setenv("KAGENT_LAUNCH_CONFIGS", rows["launch_configs"])
    monkeypatch.setenv("KAGENT_FUSION_RULES", rows["fusion_rules"])
    read = load_config()
    assert (read.launch_configs, read.fusion_rules) == (config.launch_configs, ("views",))
    monkeypatch.setenv("KAGENT_LAUNCH_CONFIGS", json.dumps(config.as_dict()["launch_configs"]))
    assert load_config().launch_configs == config.launch_configs


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "is 7, expected a table of kernels and launch configs"),
        ({"a b": "1,1,1/1,1,1"}, "has 'a b', expected names of kernels, or signatures"),
        ({"k": 5}, "has 5 for 'k', expected a launch config"),
        ({"k": "1,1/1,1"}, "has '1,1/1,1' for 'k', expected a launch config"),
        ({"k": "1,1,1/1,0,1"}, "expected at least one block and one thread in each direction"),
        ("k", "has 'k', expected KERNEL=GRID/BLOCK pairs"),
        ("k=1,1,1/1,1,1;k=1,1,1/2,1,1", "has 'k' twice, expected each kernel once"),
    ],
)
def test_config_refuses_what_is_no_launch_config(value, message):
    with pytest.raises(ConfigError) as caught:
        Config(launch_configs=value)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("rules", "message", "hint"),
    [
        (
            ["pointwise", "prolog"],
            "has 'prolog', expected 'epilogue', 'pointwise', 'prologue'",
            "did you mean 'prologue'?",
        ),
        (["zzz"], "has 'zzz', expected", "the only rules by which"),
        ([], "expected at least one rule", "fusion = false switches all of them off"),
    ],
)
def test_config_refuses_rules_that_do_not_exist(rules, message, hint):
    with pytest.raises(ConfigError) as caught:
        Config(fusion_rules=rules)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_launch_configs_are_a_mapping():
    assert LaunchConfigs({"k": FORCED}) == {"k": FORCED}


# -- from end to end, on the fake device


class Keep:
    """Keeps every context that was extracted."""

    def __init__(self):
        self.contexts = []

    @hookimpl(wrapper=True)
    def kagent_assemble(self, ctx):
        tasks = yield
        self.contexts.append(ctx)
        return tasks


@pytest.fixture
def kept():
    keep = Keep()
    with kagent_core.use_plugin(FakeDevice()), kagent_core.use_plugin(keep):
        yield keep.contexts


def run_relu(x=None):
    return kagent_core.run_op("aten::relu", torch.ones(4) if x is None else x, device="fake:0")


def test_a_block_forces_and_leaves_no_trace(kept, caplog):
    run_relu()
    with force_launch_config("aten::relu", FORCED):
        run_relu()
        run_relu()
        with force_launch_config("fake__relu", TUNED):
            run_relu()
    run_relu()
    configs = [ctx.launch_configs[0] for ctx in kept]
    assert configs == [LaunchConfig(block=(4, 1, 1)), FORCED, TUNED], "the calls in between and afterwards are replayed"
    assert [ctx.launch_choices[0].source for ctx in kept] == ["derived", "forced", "forced"]
    summary = next(record.summary for record in kept[1].records if record.stage == "derive_launch_configs")
    assert summary == "1 launch configs, 1 forced"
    document = context_as_dict(kept[1])
    assert document["launch_configs"][0]["block"] == [32, 1, 1]
    assert document["launch_choices"] == [
        {
            "source": "forced",
            "derived": {"grid": [1, 1, 1], "block": [4, 1, 1], "shared_nbytes": 0, "tiles": {}},
            "suggested": None,
            "refused": None,
        }
    ]
    assert [r for r in caplog.records if r.levelno >= logging.WARNING and "forced" in r.getMessage()] == []


def test_a_graph_that_was_compiled_before_is_forced_too(kept):
    torch._dynamo.reset()
    double = kagent_core.compile(lambda x: torch.relu(x) * 2, device="fake:0")
    double(torch.ones(4))
    with force_launch_config("fake__mul", FORCED):
        double(torch.ones(4))
    double(torch.ones(4))
    assert [[choice.source for choice in ctx.launch_choices] for ctx in kept] == [
        ["derived"] * 2,
        ["derived", "forced"],
    ]


def test_kernels_and_launch_configs_of_one_block_go_together(kept):
    def mine(x, out):
        torch.neg(x, out=out)

    with force_launch_config("mine", FORCED), override("aten::relu", mine, device="fake"):
        assert run_relu().tolist() == [-1.0] * 4
    with override("aten::relu", mine, device="fake"), force_launch_config("mine", FORCED):
        assert run_relu().tolist() == [-1.0] * 4
    assert [ctx.launch_configs[0] for ctx in kept] == [FORCED] * 2


def test_a_name_that_no_kernel_has_is_told(kept, caplog):
    with force_launch_config("fake__rleu", FORCED):
        run_relu()
    assert f"the launch config {FORCED} was forced on 'fake__rleu', but no such kernel was launched" in caplog.text


def test_a_forced_config_beyond_the_limits_is_an_error_once(kept, caplog):
    with (
        pytest.raises(
            LaunchConfigError, match=r"kernel 'fake__relu' is forced to .*: 4096 threads per block, fake:0 takes 1024"
        ),
        force_launch_config("fake__relu", TOO_LARGE),
    ):
        run_relu()
    assert "no such kernel was launched" not in caplog.text


def test_an_empty_problem_is_not_launched_whatever_is_forced(kept):
    with force_launch_config("aten::relu", FORCED):
        run_relu(torch.ones(0))
    assert kept[0].launch_configs == [None]
    assert kept[0].launch_choices[0].source == "derived"


def test_config_forces(kept):
    kagent_core.compile(torch.relu, device="fake:0", launch_configs="aten::relu=2,1,1/2,1,1")(torch.ones(4))
    assert kept[0].launch_configs == [LaunchConfig((2, 1, 1), (2, 1, 1))]
    assert kept[0].launch_choices[0].derived == LaunchConfig(block=(4, 1, 1))


def test_a_block_outranks_the_config(kept):
    torch._dynamo.reset()
    compiled = kagent_core.compile(torch.relu, device="fake:0", launch_configs="aten::relu=2,1,1/2,1,1")
    with force_launch_config("aten::relu", FORCED):
        compiled(torch.ones(4))
    assert kept[0].launch_configs == [FORCED]


def test_a_refused_suggestion_is_in_the_stage_record(kept, monkeypatch):
    monkeypatch.setattr("kagent_core.session.Session.suggest", lambda self, info, kernel, calls: TOO_LARGE)
    run_relu()
    summary = next(record.summary for record in kept[0].records if record.stage == "derive_launch_configs")
    told = "1 launch configs; suggestion refused for fake__relu: 4096 threads per block, fake:0 takes 1024"
    assert summary == told
    assert context_as_dict(kept[0])["launch_choices"][0]["suggested"]["block"] == [4096, 1, 1]
