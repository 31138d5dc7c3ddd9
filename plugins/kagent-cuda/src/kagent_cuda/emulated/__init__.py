"""A CUDA device that is emulated: the same sources, arguments and launch configs, run by the host's C++ compiler.

`device.h` is what CUDA C++ has and C++ has not. `machine.cpp` runs blocks and threads, and `accesses.h` watches what
they touch; `state.h` is what both know.
"""
