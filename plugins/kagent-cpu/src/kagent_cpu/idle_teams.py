"""Parallel regions of generated code that one thread runs: as plain calls, where OpenMP's runtime is GNU's.

Each region, of one thread too, makes a team, which takes 0.4 µs: more than many pointwise kernels of small networks.
gcc makes a function of a region, and a call of the runtime with it. The linker puts a function of ours in between,
which calls that of the region itself where there is nobody to share the work with. With that, `x + 1` on 8 floats took
8.9 µs instead of 9.4, Dynamo's part included.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from kagent_core.native import Compiler, PiecedText

_WRAPPED = "GOMP_parallel"

# outside of any region, and in one of a single thread, the work finds itself the only one in its team
_WRAPPER = f"""\
extern int omp_get_max_threads(void), omp_in_parallel(void);
void __real_{_WRAPPED}(void (*)(void *), void *, unsigned, unsigned);
__attribute__((visibility("hidden")))
void __wrap_{_WRAPPED}(void (*work)(void *), void *data, unsigned threads, unsigned flags) {{
    if ((threads == 1 || omp_get_max_threads() == 1) && !omp_in_parallel()) work(data);
    else __real_{_WRAPPED}(work, data, threads, flags);
}}
"""


def without_idle_teams(text: PiecedText, compiler: Compiler) -> tuple[PiecedText, Compiler]:
    """Return a text and what compiles it so that a parallel region of one thread makes no team.

    As they are given, where the compiler's parallel code is not for GNU's runtime, or the linker may be another one.
    """
    if sys.platform != "linux" or compiler.kind != "gcc" or compiler.single_thread is not None:
        return text, compiler
    libraries = (*compiler.libraries, f"-Wl,--wrap={_WRAPPED}")
    return replace(text, pieces=(*text.pieces, _WRAPPER)), replace(compiler, libraries=libraries)
