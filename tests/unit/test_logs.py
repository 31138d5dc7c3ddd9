"""The loggers: levels, format, and who prints a line."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kagent_core.config import LOG_COMPONENTS, TRACE
from kagent_core.errors import ConfigError
from kagent_core.inspect.logs import KagentLogger, configure, get_logger

REPOSITORY = Path(__file__).parents[2]
LOGGERS = [logging.getLogger("kagent"), *(logging.getLogger(f"kagent.{name}") for name in LOG_COMPONENTS)]


@pytest.fixture(autouse=True)
def untouched_loggers() -> Iterator[None]:
    """Loggers as a fresh process has them, before and after each test."""
    configure("")
    before = [(logger, logger.level, logger.handlers[:], logger.propagate) for logger in LOGGERS]
    for logger in LOGGERS:
        logger.handlers.clear()
    yield
    configure("")
    for logger, level, handlers, propagate in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        logger.propagate = propagate


@contextlib.contextmanager
def quiet_root() -> Iterator[logging.Logger]:
    """The root logger without pytest's handlers, as in a program that has not set up logging."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    root.handlers.clear()
    try:
        yield root
    finally:
        root.handlers[:] = handlers


def own_handlers() -> list[logging.Handler]:
    return logging.getLogger("kagent").handlers


def test_format() -> None:
    stream = io.StringIO()
    configure("extract=debug", stream)
    get_logger("extract").debug("found %s", "aten::add.Tensor")
    assert stream.getvalue() == "[kagent extract DEBUG] found aten::add.Tensor\n"


def test_levels_per_component() -> None:
    stream = io.StringIO()
    configure("extract=debug,execute=trace", stream)
    for component in ("extract", "execute", "schedule"):
        log = get_logger(component)
        log.trace("t")
        log.debug("d")
        log.info("i")
        log.warning("w")
    assert stream.getvalue().splitlines() == [
        "[kagent extract DEBUG] d",
        "[kagent extract INFO] i",
        "[kagent extract WARNING] w",
        "[kagent execute TRACE] t",
        "[kagent execute DEBUG] d",
        "[kagent execute INFO] i",
        "[kagent execute WARNING] w",
        "[kagent schedule WARNING] w",
    ]


def test_an_empty_spec_goes_back_to_warnings() -> None:
    stream = io.StringIO()
    configure("trace", stream)
    configure("", stream)
    assert [logger.level for logger in LOGGERS] == [logging.NOTSET] * len(LOGGERS)
    get_logger("extract").info("hidden")
    get_logger("extract").warning("shown")
    assert stream.getvalue() == "[kagent extract WARNING] shown\n"


def test_exceptions_are_printed_with_their_traceback() -> None:
    stream = io.StringIO()
    configure("", stream)
    try:
        raise LookupError("no kernel")
    except LookupError:
        get_logger("execute").exception("failed")
    assert stream.getvalue().startswith("[kagent execute ERROR] failed\nTraceback")
    assert "LookupError: no kernel" in stream.getvalue()


def test_a_bad_spec_changes_nothing() -> None:
    configure("extract=debug")
    with pytest.raises(ConfigError, match="unknown log component 'extrat'"):
        configure("execute=debug,extrat=debug")
    assert logging.getLogger("kagent.extract").level == logging.DEBUG
    assert logging.getLogger("kagent.execute").level == logging.NOTSET


def test_an_unknown_component_has_no_logger() -> None:
    with pytest.raises(ConfigError, match="unknown log component 'extracter'") as caught:
        get_logger("extracter")
    assert (caught.value.hint or "").startswith("did you mean 'extract'? use one of 'capture'")


def test_a_component_has_one_logger_of_the_standard_kind() -> None:
    log = get_logger("extract")
    assert isinstance(log, KagentLogger)
    assert get_logger("extract") is log
    assert log.logger is logging.getLogger("kagent.extract")
    assert type(log.logger) is logging.Logger


def test_trace_is_a_level_with_a_name() -> None:
    assert logging.getLevelName(TRACE) == "TRACE"
    assert TRACE < logging.DEBUG


def test_trace_formats_nothing_when_it_is_off() -> None:
    class Costly:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    configure("extract=debug", io.StringIO())
    assert not get_logger("extract").isEnabledFor(TRACE)
    get_logger("extract").trace("%s", Costly())


def test_trace_reports_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    configure("extract=trace")
    get_logger("extract").trace("pointer %#x", 255)
    get_logger("extract").debug("beside it")
    assert caplog.messages == ["pointer 0xff", "beside it"]
    assert [(record.funcName, record.filename) for record in caplog.records] == [
        ("test_trace_reports_the_callers_line", "test_logs.py")
    ] * 2


# -- who prints ----------------------------------------------------------------------------------------------


def test_stderr_by_default_looked_up_when_a_line_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_root():
        configure("extract")
        late = io.StringIO()
        monkeypatch.setattr(sys, "stderr", late)
        get_logger("extract").debug("a")
        assert late.getvalue() == "[kagent extract DEBUG] a\n"
        monkeypatch.setattr(sys, "stderr", None)  # a program without a console
        get_logger("extract").debug("b")


def test_configuring_again_prints_once_and_to_the_latest_stream() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("extract", first)
    configure("extract", first)
    get_logger("extract").debug("a")
    first.close()
    configure("extract", second)
    get_logger("extract").debug("b")
    assert len(own_handlers()) == 1
    assert second.getvalue() == "[kagent extract DEBUG] b\n"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_line_that_the_root_logger_prints_is_not_printed_again(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_root() as root:
        stderr, programs = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", stderr)
        if when == "after":
            configure("extract")
        root.addHandler(logging.StreamHandler(programs))
        if when == "before":
            configure("extract")
        get_logger("extract").debug("a")
        assert programs.getvalue() == "a\n"
        assert stderr.getvalue() == ""


def test_a_line_below_the_level_of_the_programs_handler_is_still_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with quiet_root() as root:
        stderr, programs = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", stderr)
        handler = logging.StreamHandler(programs)
        handler.setLevel(logging.WARNING)
        root.addHandler(handler)
        configure("extract")
        get_logger("extract").debug("asked for")
        get_logger("extract").warning("told anyway")
        assert stderr.getvalue() == "[kagent extract DEBUG] asked for\n"
        assert programs.getvalue() == "told anyway\n"


def test_a_stream_that_is_given_gets_each_line_once() -> None:
    with quiet_root() as root:
        stream, elsewhere = io.StringIO(), io.StringIO()
        root.addHandler(logging.StreamHandler(elsewhere))
        configure("extract", stream)
        get_logger("extract").debug("a")
        assert stream.getvalue() == "[kagent extract DEBUG] a\n"
        root.addHandler(logging.StreamHandler(stream))
        get_logger("extract").debug("b")
        assert stream.getvalue() == "[kagent extract DEBUG] a\nb\n"
        assert elsewhere.getvalue() == "a\nb\n"


def test_a_handler_of_the_program_on_kagent_is_enough() -> None:
    programs = io.StringIO()
    handler = logging.StreamHandler(programs)
    logging.getLogger("kagent").addHandler(handler)
    configure("extract")
    get_logger("extract").debug("a")
    assert own_handlers() == [handler]
    assert programs.getvalue() == "a\n"


def test_a_null_handler_prints_nothing_so_kagent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_root() as root:
        stderr = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stderr)
        root.addHandler(logging.NullHandler())
        logging.getLogger("kagent").addHandler(logging.NullHandler())
        configure("extract")
        get_logger("extract").debug("a")
        assert stderr.getvalue() == "[kagent extract DEBUG] a\n"


def test_root_handlers_do_not_count_where_kagent_does_not_propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet_root() as root:
        stderr, programs = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stderr", stderr)
        root.addHandler(logging.StreamHandler(programs))
        logging.getLogger("kagent").propagate = False
        configure("extract")
        get_logger("extract").debug("a")
        assert stderr.getvalue() == "[kagent extract DEBUG] a\n"
        assert programs.getvalue() == ""


def test_a_stream_that_fails_does_not_end_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    stream = io.StringIO()
    configure("extract", stream)
    stream.close()
    get_logger("extract").debug("lost")
    assert "lost" in stderr.getvalue()


def test_capturing_works_with_and_without_configure(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("extract").warning("before")
    configure("extract=info")
    get_logger("extract").info("asked for")
    get_logger("extract").debug("not asked for")
    configure("")
    with caplog.at_level(logging.DEBUG, logger="kagent"):
        get_logger("extract").debug("captured")
    get_logger("extract").info("not captured")
    assert caplog.messages == ["before", "asked for", "captured"]


# -- whose levels --------------------------------------------------------------------------------------------


def test_a_level_that_the_program_set_is_left_alone() -> None:
    logging.getLogger("kagent").setLevel(logging.INFO)
    configure("extract=debug")
    logging.getLogger("kagent.extract").setLevel(logging.ERROR)
    logging.getLogger("kagent.profile").setLevel(TRACE)
    configure("")
    assert logging.getLogger("kagent").level == logging.INFO
    assert logging.getLogger("kagent.extract").level == logging.ERROR
    assert logging.getLogger("kagent.profile").level == TRACE


def test_the_root_logger_is_left_alone() -> None:
    root = logging.getLogger()
    before = (root.level, root.handlers[:], logging.getLoggerClass(), logging.lastResort)
    configure("trace", io.StringIO())
    assert (root.level, root.handlers, logging.getLoggerClass(), logging.lastResort) == before


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads that take turns as often as they can, so that a race shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switching")
def test_configure_from_many_threads() -> None:
    stream = io.StringIO()
    handlers_per_round: list[int] = []

    def next_round() -> None:
        handlers_per_round.append(len(own_handlers()))
        own_handlers().clear()

    barrier = threading.Barrier(8, action=next_round)

    def work(number: int) -> None:
        for turn in range(100):
            barrier.wait(timeout=60)
            configure("trace" if (number + turn) % 2 else "", stream)
        barrier.wait(timeout=60)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()
    assert handlers_per_round == [0] + [1] * 100
    configure("")
    assert {logger.level for logger in LOGGERS} == {logging.NOTSET}


@pytest.mark.usefixtures("eager_switching")
def test_no_line_is_lost_or_printed_twice_while_configure_runs() -> None:
    stream = io.StringIO()

    def work(number: int) -> None:
        for turn in range(50):
            configure("trace" if (number + turn) % 2 else "", stream)
            get_logger("execute").warning("line %d", number)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()
    assert sorted(stream.getvalue().splitlines()) == sorted(
        f"[kagent execute WARNING] line {number}" for number in range(8) for _ in range(50)
    )


def test_importing_the_module_installs_nothing() -> None:
    script = (
        "import logging, sys, kagent_core.inspect.logs as logs; log = logs.get_logger('plugins');"
        "sys.exit(bool(logging.getLogger('kagent').handlers or logging.getLogger().handlers))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)
