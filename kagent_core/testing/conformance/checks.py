"""Cases made of plain functions: one per check, and a script that holds the function's own text."""

from __future__ import annotations

import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kagent_core.specs import Device
from kagent_core.testing.conformance.case import Case, Ran, Target

Check = Callable[..., "Ran | str | None"]
"""Takes the device's name, and ``full`` where it has such a parameter; returns what it ran, a note, or None."""


@dataclass(frozen=True)
class _Entry:
    check: Check
    family: str
    quick: Mapping[str, Sequence[Any]]
    full: Mapping[str, Sequence[Any]]


class Checks:
    """The checks of one level.

    Parameters
    ----------
    level
        Position in `LEVELS`.
    """

    def __init__(self, level: int) -> None:
        self.level = level
        self._entries: list[_Entry] = []

    def add(
        self, family: str, full: Mapping[str, Sequence[Any]] | None = None, **quick: Sequence[Any]
    ) -> Callable[[Check], Check]:
        """Make a function a check; its name, with spaces, is the case's name.

        Parameters
        ----------
        family
            What it is counted with.
        full
            Values of parameters that only the full size tries, beside the others.
        **quick
            Values of its parameters: there is a case for each combination.
        """

        def keep(check: Check) -> Check:
            self._entries.append(_Entry(check, family, quick, full or {}))
            return check

        return keep

    def cases(self, target: Target) -> Iterator[Case]:
        """Yield the level's cases, in the order in which the checks were added."""
        for entry in self._entries:
            values = {
                name: [*given, *(entry.full.get(name, ()) if target.full else ())]
                for name, given in entry.quick.items()
            }
            for combination in itertools.product(*values.values()):
                yield self._case(entry, dict(zip(values, combination, strict=True)))

    def _case(self, entry: _Entry, given: dict[str, Any]) -> Case:
        name = entry.check.__name__.replace("_", " ")
        if given:
            name += ": " + ", ".join(
                value if isinstance(value, str) else f"{parameter}={value}" for parameter, value in given.items()
            )

        def arguments(target: Target) -> dict[str, Any]:
            sized = "full" in inspect.signature(entry.check).parameters
            return {**given, "full": target.full} if sized else given

        def run(target: Target) -> Ran:
            found = entry.check(target.device, **arguments(target))
            return found if isinstance(found, Ran) else Ran(note=found or "")

        def script(target: Target) -> str:
            return script_of(entry.check, f"{self.level}/{name}", target.device, arguments(target))

        return Case(self.level, name, entry.family, run, script)


def script_of(check: Check, key: str, device: str, given: Mapping[str, Any]) -> str:
    """Return a script that runs one check by itself, with its text in it.

    Parameters
    ----------
    check
        The check.
    key
        The case's, for the first line.
    device, given
        What it is called with.
    """
    imports: dict[str, None] = {}
    sources: dict[str, str] = {}
    _collect(check, check.__module__, imports, sources)
    call = ", ".join([repr(device), *(f"{name}={value!r}" for name, value in given.items())])
    lines = [
        f'"""Case {key} of kagent\'s conformance kit, on {device}."""',
        "",
        "from __future__ import annotations",
        "",
    ]
    called = f"{check.__name__}({call})"
    last = [called]
    if Device.parse(device).type == "fake":  # nobody but the script brings it
        imports["import kagent_core"] = imports["from kagent_core.testing import FakeDevice"] = None
        last = ["with kagent_core.use_plugin(FakeDevice()):", f"    {called}"]
    lines += sorted({*imports, "import torch"}, key=lambda line: (line.startswith("from"), line))
    lines += ["", ""]
    for source in sources.values():
        lines += [source, "", ""]
    return "\n".join([*lines, *last]) + "\n"


def _collect(function: Any, home: str, imports: dict[str, None], sources: dict[str, str]) -> None:
    """Note a function's text, and what it needs: the text of its module's own, an import of anything else."""
    for name, value in _globals_of(function):
        if isinstance(value, types.ModuleType):
            imports[f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")] = None
        elif getattr(value, "__module__", None) == home and inspect.isfunction(value):
            if name not in sources and value is not function:
                sources[name] = ""  # noted first: functions may call each other
                _collect(value, home, imports, sources)
        elif inspect.isfunction(value) or inspect.isclass(value):
            imports[f"from {value.__module__} import {name}"] = None
        else:
            imports[f"from {home} import {name}"] = None
    text = textwrap.dedent(inspect.getsource(function))
    sources.pop(function.__name__, None)
    sources[function.__name__] = text[text.index("def ") :].rstrip()


def _globals_of(function: Any) -> list[tuple[str, Any]]:
    codes, names = [function.__code__], dict[str, None]()
    while codes:
        code = codes.pop()
        names.update(dict.fromkeys(code.co_names))
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    # where pytest has rewritten the assertions, names of its own are among them, such as @pytest_ar
    return [
        (name, function.__globals__[name]) for name in names if name.isidentifier() and name in function.__globals__
    ]
