"""How products are cut into pieces for blocks of threads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from kagent_core.codegen.c_family import CFamily
from kagent_core.codegen.generic.block_tiles import BlockTile, Problem, block_tile, line_of
from kagent_core.codegen.generic.builder import KernelBuilder
from kagent_core.codegen.generic.tiles import DEFAULT_TILES
from kagent_core.codegen.groups import WorkGroups
from kagent_core.codegen.rules import RULES
from kagent_core.codegen.work_items import WorkItemLanguage
from kagent_core.errors import LaunchConfigError
from kagent_core.specs import OpCall

from ..codegen_programs import program

SIZES = (1, 2, 3, 17, 33, 100, 129, 4096)


@functools.cache
def product() -> OpCall:
    [call] = program(torch.mm, torch.empty(2, 2), torch.empty(2, 2)).calls
    return call


def builder(threads: int = 256, local_nbytes: int = 32 << 10, **sizes: int) -> KernelBuilder:
    language = WorkItemLanguage()
    language.groups = WorkGroups(threads=threads, local_nbytes=local_nbytes)
    tiles = DEFAULT_TILES.with_sizes(tuple(sizes.items()))
    return KernelBuilder(product(), (), None, language, RULES, tiles=tiles)


def tile(m: int, n: int, depth: int, batch: int = 1, nbytes: int = 4, alone: bool = True, **given: Any) -> BlockTile:
    return block_tile(builder(**given), Problem(m, n, depth, batch, nbytes, alone))


def test_without_groups_there_are_none() -> None:
    assert KernelBuilder(product(), (), None, CFamily(), RULES).work_groups is None
    assert KernelBuilder(product(), (), None, WorkItemLanguage(), RULES).work_groups is None


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ((4096, 4096, 4096), BlockTile(128, 128, 8, 8, 8, 1, 256)),
        ((512, 512, 512), BlockTile(32, 64, 32, 4, 4, 2, 256)),
        ((64, 64, 64, 1000), BlockTile(64, 64, 16, 4, 4, 1, 256)),
        ((1, 4096, 4096), BlockTile(1, 32, 64, 1, 4, 32, 256)),
        ((1, 1, 1000), BlockTile(1, 1, 1024, 1, 1, 256, 256)),
        ((3, 3, 3, 10_000), BlockTile(4, 4, 4, 4, 4, 4, 32)),
    ],
)
def test_pieces_suit_the_problem(problem: tuple[int, ...], expected: BlockTile) -> None:
    assert tile(*problem) == expected


@pytest.mark.parametrize("nbytes", [1, 4, 8])
@pytest.mark.parametrize("threads", [8, 64, 256, 1024])
def test_pieces_fit_into_a_block(threads: int, nbytes: int) -> None:
    for m in SIZES:
        for n in SIZES:
            for depth in (0, 5, 3000):
                found = tile(m, n, depth, nbytes=nbytes, threads=threads)
                assert found.computing <= found.threads <= threads
                assert found.shared_length * nbytes <= 32 << 10
                assert found.thread_rows * found.thread_columns * nbytes <= 512
                assert found.depth % found.slices == 0


def test_a_kernel_of_several_products_has_one_number_of_threads() -> None:
    assert {tile(*problem, alone=False).threads for problem in ((3, 3, 3), (1, 1, 9), (500, 500, 500))} == {256}


def test_little_shared_memory_makes_small_pieces() -> None:
    found = tile(4096, 4096, 4096, local_nbytes=4096)
    assert found.shared_length * 4 <= 4096
    assert found.rows * found.columns < 128 * 128


def test_what_a_launch_config_says_is_taken() -> None:
    found = tile(4096, 4096, 4096, block_rows=16, block_columns=64, block_depth=32, thread_rows=2, thread_columns=4)
    assert found == BlockTile(16, 64, 32, 2, 4, 2, 256)
    assert tile(4096, 4096, 4096, block_columns=16).columns == 16


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_rows": 512, "block_columns": 512}, "take 4096 threads of a block, expected at most 256"),
        ({"thread_rows": 16, "thread_columns": 16}, "take 1024 bytes of a thread's registers for sums"),
    ],
)
def test_what_does_not_fit_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LaunchConfigError, match=message):
        tile(4096, 4096, 4096, **sizes)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("others", [1, 2, 16])
def test_threads_have_every_line_once(count: int, others: int) -> None:
    found = {
        eval(line_of(count, str(own), str(step), others).replace("/", "//"))
        for own in range(others)
        for step in range(count)
    }
    assert found == set(range(count * others))
