"""``kagent run``: a script in which kagent is the default backend of ``torch.compile``."""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import sys
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kagent_core.cli.output import DeviceOption
from kagent_core.config import load_config
from kagent_core.errors import KagentError


def run_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python script.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.", show_default=False)] = None,
    device: DeviceOption = None,
) -> None:
    """Run a script with kagent as the default backend of torch.compile.

    Every torch.compile call that names no backend gets kagent, on the configured device.
    A call that names one keeps it.
    Everything else is as with: python SCRIPT ARGS...
    """
    options = {} if device is None else {"device": device}
    config = load_config(options)
    source = _read(script)

    from kagent_core.default_backend import default_backend
    from kagent_core.session import session_for

    session_for(config)  # a device that cannot be used is told before the script starts

    # Closed at exit, not when the script's last line is done: its threads may still compile something.
    stack = ExitStack()
    stack.enter_context(default_backend(options))
    atexit.register(stack.close)
    _run_as_main(script, source, args or [])


def _read(script: Path) -> bytes:
    if script.is_dir():
        raise KagentError(f"'{script}' is a directory, expected a Python script")
    try:
        return script.read_bytes()
    except OSError as error:
        raise KagentError(f"cannot read the script '{script}': {error.strerror}") from None


def _run_as_main(script: Path, source: bytes, args: list[str]) -> None:
    """Run a script as ``python SCRIPT ARGS...`` does: its name, its arguments, its way to end."""
    path = str(Path.cwd() / script)
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__cached__"] = None
    sys.modules["__main__"] = main
    sys.argv = [str(script), *args]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  the script's own errors end it as they would end Python
        _end_with_traceback(error, path)


def _end_with_traceback(error: BaseException, path: str) -> NoReturn:
    """Print the script's uncaught error from its own frames on, and end as Python does."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename != path:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
