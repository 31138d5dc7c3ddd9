"""Parallel regions of generated code make a team of threads where there is something to share, and only there."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest
import torch

from kagent_core.config import load_config
from kagent_core.native import Library, PiecedText, find_compiler, load
from kagent_cpu.idle_teams import without_idle_teams

_TEXT = """
#include <stdint.h>
extern int omp_get_num_threads(void), omp_get_thread_num(void), omp_get_level(void);
"""

_FUNCTIONS = """
void work(int64_t *t) {
    int64_t sum = 0, threads = 0, level = 0;
    #pragma omp parallel for if (t[0] > 100) reduction(+ : sum) reduction(max : threads, level)
    for (int64_t i = 0; i < t[0]; i++) {
        sum += i;
        if (omp_get_num_threads() > threads) threads = omp_get_num_threads();
        level = omp_get_level();
    }
    t[1] = sum; t[2] = threads; t[3] = level;
}
void nested(int64_t *t) {
    int64_t sum = 0;
    #pragma omp parallel for reduction(+ : sum) num_threads(2)
    for (int64_t n = 0; n < 2; n++) {
        int64_t inner[4] = {t[0]};
        work(inner);
        sum += inner[1];
    }
    t[1] = sum;
}
"""


@pytest.fixture(scope="module")
def library() -> Library:
    compiler = find_compiler()
    assert compiler is not None
    text, chosen = without_idle_teams(PiecedText(_TEXT, (_FUNCTIONS,)), compiler)
    if chosen is compiler:
        pytest.skip("parallel code is not for GNU's runtime here")
    return load(text, load_config().cache_dir, chosen)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _called(library: Library, name: str, count: int) -> list[int]:
    table = (ctypes.c_int64 * 4)(count)
    library.function(name)(ctypes.addressof(table))
    return list(table)[1:]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("most", "count", "team"), [(1, 50, (1, 0)), (1, 5000, (1, 0)), (2, 50, (1, 0)), (2, 5000, (2, 1))]
)
def test_who_shares_the_work(library: Library, most: int, count: int, team: tuple[int, int]) -> None:
    torch.set_num_threads(most)
    assert _called(library, "work", count) == [count * (count - 1) // 2, *team]


@pytest.mark.usefixtures("threads")
def test_in_a_region_of_two_threads_each_does_all_of_its_work(library: Library) -> None:
    torch.set_num_threads(2)
    for count in (50, 5000):
        assert _called(library, "nested", count)[0] == count * (count - 1)


def test_in_another_thread(library: Library) -> None:
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.append(_called(library, "work", 50)))
    thread.start()
    thread.join()
    assert found == [[50 * 49 // 2, 1, 0]]
