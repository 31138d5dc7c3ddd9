"""Every error that kagent raises on purpose.

An error says what came, what was expected and what to do next. The first line is one lower-case sentence
with the offending value in it; a hint, if there is one, follows on its own line after ``hint:``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KagentError(Exception):
    """Base class of kagent's errors.

    Parameters
    ----------
    message
        One sentence: what came and what was expected.
    hint
        What the user can do about it.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint


class ConfigError(KagentError, ValueError):
    """A configuration key or value that kagent does not know."""


class PluginError(KagentError, ImportError):
    """A plugin that cannot be used: it fails to import, or it speaks another contract version."""


class PluginConflictError(PluginError):
    """Two plugins claim the same name or the same device type."""


class DeviceError(KagentError, RuntimeError):
    """A device that does not exist, or that its plugin cannot open on this machine."""


class CaptureError(KagentError, RuntimeError):
    """A program that cannot be turned into ATen operators."""


class ValidationError(KagentError, ValueError):
    """An operator call whose specs contradict each other or its device."""


class SignatureError(KagentError, LookupError):
    """An operator name that the installed torch does not have."""


class RegistryError(KagentError, ValueError):
    """A kernel registration that is refused: two kernels tie, or the registry is frozen."""


class KernelNotFoundError(KagentError, LookupError):
    """No registered kernel takes the operator call, and config does not allow a fallback."""


class PackingError(KagentError, TypeError):
    """An argument that does not fit the parameter that its kernel declares."""


class LaunchConfigError(KagentError, ValueError):
    """A launch config that the device cannot run."""


class CompilationError(KagentError, RuntimeError):
    """A kernel that its compiler refuses, or that there is no compiler for; a library that cannot be loaded."""


class ExecutionError(KagentError, RuntimeError):
    """The executor cannot go on: a queue was shut down or a worker died."""


class KernelExecutionError(ExecutionError):
    """A kernel failed while it ran.

    The message names the operator, the dtypes and shapes that it was given and the line of the user's program.
    The error is also an instance of the original exception's class where Python allows that, so that code which
    catches eager PyTorch's exception (``IndexError``, say) goes on working; the original is its ``__cause__``.
    """

    def __str__(self) -> str:
        return self.message  # KeyError, as a second base, would print its repr

    @staticmethod
    def wrapping(cause: Exception, message: str) -> KernelExecutionError:
        """Build the error for `cause`, which the caller raises ``from cause``."""
        kind = type(cause)
        if isinstance(cause, RuntimeError) or kind is Exception:
            return KernelExecutionError(message)
        try:
            error: KernelExecutionError = type(f"Kernel{kind.__name__}", (KernelExecutionError, kind), {})(message)
            return error
        except TypeError:  # the class forbids subclassing, or its constructor wants other arguments
            return KernelExecutionError(message)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to `word`, or None when nothing is close.

    Examples
    --------
    >>> nearest("devise", ["device", "fallback"])
    'device'
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def choices(known: Iterable[str]) -> str:
    """Return the known words as text for a hint: ``'a', 'b' or 'c'``.

    Examples
    --------
    >>> choices(["cuda", "cpu"])
    "'cpu' or 'cuda'"
    """
    words = [f"'{word}'" for word in sorted(known)]
    if not words:
        return "none"
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} or {words[-1]}"
