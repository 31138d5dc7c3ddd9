"""C text in, functions out: a C compiler, a cache of shared libraries and their loading.

Nothing here knows what the functions compute.
"""

from kagent_core.native.compiler import Compiler, find_compiler, why_no_compiler
from kagent_core.native.library import Library, load
from kagent_core.native.pieces import PiecedText

__all__ = ["Compiler", "Library", "PiecedText", "find_compiler", "load", "why_no_compiler"]
