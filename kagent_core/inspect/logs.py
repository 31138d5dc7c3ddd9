"""Logging: one logger per component, levels by ``KAGENT_LOGS``.

The loggers are the standard library's, named ``kagent.<component>``, so a program can treat them like any
others. Nothing here touches the root logger, and a line that the program's own handlers take is not printed a
second time.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from kagent_core.config import LOG_COMPONENTS, TRACE, parse_log_spec
from kagent_core.errors import ConfigError, choices, nearest

ROOT_NAME = "kagent"

logging.addLevelName(TRACE, "TRACE")

_lock = threading.Lock()
# The levels that `configure` set, so that it takes back only those, and none that the program set itself.
_levels_set: dict[str, int] = {}


class KagentLogger(logging.LoggerAdapter[logging.Logger]):
    """A component's logger, with a level TRACE below DEBUG."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, None)

    def trace(self, msg: str, *args: object, **kwargs: Any) -> None:
        """Log at TRACE: every pointer, every byte range."""
        if self.logger.isEnabledFor(TRACE):
            self.logger.log(TRACE, msg, *args, stacklevel=kwargs.pop("stacklevel", 1) + 1, **kwargs)


@functools.cache
def get_logger(component: str) -> KagentLogger:
    """Return the logger of a component, one of `LOG_COMPONENTS`.

    Raises
    ------
    ConfigError
        For a component that does not exist.
    """
    if component not in LOG_COMPONENTS:
        close = nearest(component, LOG_COMPONENTS)
        meant = f"did you mean {close!r}? " if close else ""
        raise ConfigError(f"unknown log component '{component}'", hint=f"{meant}use one of {choices(LOG_COMPONENTS)}")
    return KagentLogger(logging.getLogger(f"{ROOT_NAME}.{component}"))


def configure(spec: str, stream: TextIO | None = None) -> None:
    """Set the level of every component, and see to it that its lines are printed.

    A component that `spec` does not name goes back to what it was: it logs from WARNING on, unless the
    program set a level for it, for ``kagent`` or for the root logger. Calling this again replaces what the
    earlier call did.

    Parameters
    ----------
    spec
        The syntax of ``KAGENT_LOGS``, such as ``extract=debug,execute=trace``; see `parse_log_spec`.
    stream
        Where to print. By default, the ``sys.stderr`` of the moment, and only those lines that no handler of
        the program takes. A stream that is given gets every line, unless a handler of the program already
        writes to it.

    Raises
    ------
    ConfigError
        For a component or level that does not exist; nothing is changed then.
    """
    levels = parse_log_spec(spec)
    with _lock:
        for component in LOG_COMPONENTS:
            _set_level(logging.getLogger(f"{ROOT_NAME}.{component}"), levels.get(component))
        _install_handler(logging.getLogger(ROOT_NAME), stream)


def _set_level(logger: logging.Logger, level: int | None) -> None:
    ours = _levels_set.pop(logger.name, None)
    if level is not None:
        logger.setLevel(level)
        _levels_set[logger.name] = level
    elif ours is not None and logger.level == ours:
        logger.setLevel(logging.NOTSET)


def _install_handler(root: logging.Logger, stream: TextIO | None) -> None:
    ours = next((handler for handler in root.handlers if isinstance(handler, _Handler)), None)
    if ours is not None:
        ours.stream = stream
    elif stream is not None or not any(map(_prints, root.handlers)):
        root.addHandler(_Handler(stream))


def _prints(handler: logging.Handler) -> bool:
    return not isinstance(handler, _Handler | logging.NullHandler)


class _Handler(logging.Handler):
    """Prints the lines that nobody else does.

    Who else there is, is asked line by line: a program may set up its logging after kagent did, and a test's
    capturing handler comes and goes.
    """

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self.stream = stream
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless one of the program's handlers does."""
        try:
            stream = sys.stderr if self.stream is None else self.stream
            others = _other_handlers(record)
            if self.stream is not None:
                others = (other for other in others if getattr(other, "stream", None) is stream)
            if stream is None or next(others, None) is not None:
                return
            stream.write(f"{self.format(record)}\n")
            stream.flush()
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001  a full disk must not end a computation; logging prints the traceback to stderr
            self.handleError(record)


class _Formatter(logging.Formatter):
    """Formats a record as ``[kagent extract DEBUG] message``."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's name)
        """Put the logger's name, in words, and the level before the message."""
        return f"[{record.name.replace('.', ' ')} {record.levelname}] {record.message}"


def _other_handlers(record: logging.LogRecord) -> Iterator[logging.Handler]:
    """Yield the program's handlers that take a record, by the rules of `logging.Logger.callHandlers`."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        for handler in logger.handlers:
            if _prints(handler) and record.levelno >= handler.level:
                yield handler
        logger = logger.parent if logger.propagate else None
