"""The configuration: its sources, their order, what they accept and what they say of a mistake."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kagent_core.config import (
    Config,
    Placement,
    Source,
    config_rows,
    load_config,
    load_config_with_sources,
    parse_log_spec,
)
from kagent_core.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project as the current directory, and an environment without kagent's variables."""
    for name in os.environ:
        if name.upper().startswith("KAGENT_"):
            monkeypatch.delenv(name)
    directory = tmp_path / "project"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def failure(**values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    return caught.value


# -- the value -----------------------------------------------------------------------------------------------


def test_defaults() -> None:
    config = load_config()
    assert config == Config()
    assert (config.device, config.fallback_device, config.missing_kernel) == ("auto", "cpu", "fallback")
    assert (config.placement, config.fusion, config.fusion_fuel) == (Placement(), True, None)
    assert (config.plugins_allow, config.plugins_block, config.emulate) == (None, (), ())
    assert (config.logs, config.dump, config.profile, config.threads) == ("", None, False, None)
    assert config.plan_cache_size == 32
    assert config.cache_dir.is_absolute()
    assert config.cache_dir.name == "kagent"


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().device = "cpu"  # type: ignore[misc]


def test_equal_configs_are_one_cache_key() -> None:
    settings: dict[str, Any] = {"device": "cpu", "plugins_block": ["a"], "dump": "/d"}
    first = Config(placement={"aten::sort": "cpu", "aten::topk": "cpu"}, **settings)
    second = Config(placement={"aten::topk": "cpu", "aten::sort": "cpu"}, **settings)
    other = Config(placement={"aten::topk": "cpu"}, **settings)
    assert {first: "plan"}[second] == "plan"
    assert other != first
    assert other not in {first: "plan"}


def test_config_survives_pickling() -> None:
    config = Config(device="cuda:1", placement={"aten::sort": "cpu"})
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert hash(again) == hash(config)


def test_keywords_alone_ignore_the_environment_and_the_file(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    monkeypatch.setenv("KAGENT_DEVICE", "cuda")
    (project / "kagent.toml").write_text("threads = 3")
    assert Config() == Config(device="auto", threads=None)


def test_replace_validates() -> None:
    config = Config(device="cpu", placement={"aten::sort": "cpu"})
    assert config.replace(threads=2) == Config(device="cpu", placement={"aten::sort": "cpu"}, threads=2)
    with pytest.raises(ConfigError, match="option 'threads' is 0"):
        config.replace(threads=0)


def test_as_dict_is_json() -> None:
    config = Config(dump="/d", placement={"aten::sort": "cpu"}, plugins_block=("a", "b"))
    again = json.loads(json.dumps(config.as_dict()))
    assert again["dump"] == str(Path("/d").absolute())
    assert again["placement"] == {"aten::sort": "cpu"}
    assert again["plugins_block"] == ["a", "b"]
    assert Config(**again) == config


def test_every_key_is_described() -> None:
    assert [key for key, field in Config.model_fields.items() if not field.description] == []


def test_placement_is_a_frozen_mapping() -> None:
    placement = Placement({"aten::sort": "cpu"})
    assert placement["aten::sort"] == "cpu"
    assert placement.get("aten::topk") is None
    assert dict(placement) == {"aten::sort": "cpu"}
    assert len(placement) == 1
    with pytest.raises(TypeError):
        placement["aten::sort"] = "cuda"  # type: ignore[index]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda:0", "opencl:12", "my_npu2:1"])
def test_devices(device: str) -> None:
    assert Config(device=device).device == device


def test_paths_are_absolute_and_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("USERPROFILE", "/home/somebody")
    assert Config(dump="~/dumps").dump == Path("/home/somebody/dumps").absolute()
    assert Config(dump="dumps").dump == project / "dumps"


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096 B", 4096),
        ("1.5KiB", 1536),
        ("512 MB", 512_000_000),
        ("4GiB", 4 << 30),
        ("2 TiB", 2 << 40),
        ("1kB", 1000),
        (None, None),
    ],
)
def test_a_number_of_bytes_may_have_a_unit(value: object, nbytes: int | None) -> None:
    assert Config(device_memory_limit=value).device_memory_limit == nbytes


# -- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "message", "hint"),
    [
        ("device", "CUDA:0", "is 'CUDA:0', expected 'auto' or a device TYPE", "did you mean 'cuda:0'?"),
        ("device", "cuda-0", "is 'cuda-0'", "did you mean 'cuda:0'?"),
        ("device", "cuda:", "is 'cuda:'", "did you mean 'cuda'?"),
        ("device", "auto:1", "is 'auto:1'", "where operators run"),
        ("device", "cuda:\u0663", "expected 'auto' or", "did you mean 'cuda'?"),
        ("device", 3, "is 3, expected a string", "where operators run"),
        ("fallback_device", "auto", "is 'auto', expected a device TYPE", "where an operator runs"),
        ("missing_kernel", "fall", "expected 'error' or 'fallback'", "did you mean 'fallback'?"),
        ("placement", 3, "is 3, expected a table", "aten::sort"),
        ("placement", {"aten.sort": "cpu"}, "has 'aten.sort', expected signatures such as", "aten::sort"),
        ("placement", {"aten::sort": "CPU"}, "has 'CPU' for 'aten::sort'", "did you mean 'cpu'?"),
        ("placement", {"aten::sort": "auto"}, "has 'auto' for 'aten::sort'", "operators with"),
        ("placement", "aten::sort", "has 'aten::sort', expected SIGNATURE=DEVICE", "aten::sort=cpu"),
        ("placement", "aten::a=cpu,aten::a=cuda", "has 'aten::a' twice", "operators with"),
        ("placement", "{", "expected JSON", "operators with"),
        ("fusion", "flase", "is 'flase', expected true or false", "did you mean false?"),
        ("fusion", None, "is None, expected true or false", "whether neighbouring"),
        ("fusion_fuel", "ten", "is 'ten', expected a whole number", "fuse only"),
        ("fusion_fuel", 1.5, "is 1.5, expected a whole number", "fuse only"),
        ("fusion_fuel", True, "is True, expected a whole number", "fuse only"),
        ("fusion_fuel", -1, "is -1, expected a whole number of at least 0", "fuse only"),
        ("plan_cache_size", 0, "is 0, expected a whole number of at least 1", "execution plans"),
        ("device_memory_limit", "4 gigs", "is '4 gigs', expected a number of bytes", "'4GiB'"),
        ("device_memory_limit", "-1GiB", "expected a number of bytes", "'512 MB'"),
        ("device_memory_limit", True, "is True, expected a number of bytes", "the most memory"),
        ("device_memory_limit", 0, "is 0, expected a whole number of at least 1", "the most memory"),
        ("parameters", "version_counter", "expected 'checked', 'copied' or 'version'", "did you mean 'version'?"),
        ("threads", 0, "is 0, expected a whole number of at least 1", "CPU threads"),
        ("plugins_allow", 3, "is 3, expected a list of names", "the only plugins"),
        ("plugins_block", ["a", 3], "[1] is 3, expected a string", "never loaded"),
        ("emulate", "cuda:0", "has 'cuda:0', expected device types", "did you mean 'cuda'?"),
        ("cache_dir", "", "is '', expected a path", "directory of"),
        ("dump", 3, "is 3, expected a path", "directory that"),
        ("dump", "~nobody-of-that-name/x", "expected a path", "home directory"),
        ("logs", "extrct=debug", ": unknown log component 'extrct'", "did you mean 'extract'?"),
    ],
)
def test_a_bad_value_says_what_came_what_was_expected_and_what_to_do(
    key: str, value: object, message: str, hint: str
) -> None:
    error = failure(**{key: value})
    assert error.message.startswith(f"option '{key}'")
    assert message in error.message
    assert hint in (error.hint or "")
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_an_unknown_key_names_the_nearest_one_and_all() -> None:
    error = failure(devise="cpu")
    assert error.message == "option 'devise' is no configuration key"
    assert error.hint is not None
    assert error.hint.startswith("did you mean 'device'? the keys are cache_dir, compaction, device")
    assert all(key in error.hint for key in Config.model_fields)


def test_a_key_unlike_any_other_gets_no_guess() -> None:
    assert (failure(zzz=1).hint or "").startswith("the keys are")


# -- options -------------------------------------------------------------------------------------------------


def test_options_may_have_hyphens() -> None:
    assert load_config({"fusion-fuel": 3}).fusion_fuel == 3


@pytest.mark.parametrize("options", ["cpu", ["device"]])
def test_options_that_are_no_mapping(options: Any) -> None:
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(options)


def test_an_option_given_in_two_spellings() -> None:
    with pytest.raises(ConfigError, match="option 'fusion_fuel' repeats 'fusion-fuel'"):
        load_config({"fusion-fuel": 1, "fusion_fuel": 2})


@pytest.mark.parametrize("key", [3, "devise", "_sources", "_env_file", "self"])
def test_an_option_that_is_no_key(key: Any) -> None:
    with pytest.raises(ConfigError, match=f"option '{key}' is no configuration key"):
        load_config({key: "cpu"})


# -- the environment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("DEVICE", "opencl:1", "opencl:1"),
        ("FUSION", "off", False),
        ("FUSION", "1", True),
        ("PROFILE", "TRUE", True),
        ("FUSION_FUEL", "7", 7),
        ("FUSION_FUEL", "none", None),
        ("THREADS", "", None),
        ("PLUGINS_ALLOW", "cuda, cpu,", ("cuda", "cpu")),
        ("PLUGINS_BLOCK", "cuda", ("cuda",)),
        ("EMULATE", "cuda,opencl", ("cuda", "opencl")),
        ("PLACEMENT", "aten::sort=cpu, aten::a.b = cuda:1", {"aten::sort": "cpu", "aten::a.b": "cuda:1"}),
        ("PLACEMENT", '{"aten::sort": "cpu"}', {"aten::sort": "cpu"}),
        ("LOGS", "extract=debug,execute=trace", "extract=debug,execute=trace"),
        ("DUMP", "/dumps", Path("/dumps").absolute()),
    ],
)
def test_environment_values(name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"KAGENT_{name}", text)
    assert getattr(load_config(), name.lower()) == value


def test_an_unknown_variable_names_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_DEVISE", "cpu")
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert caught.value.message == "unknown environment variable KAGENT_DEVISE"
    assert (caught.value.hint or "").startswith("did you mean 'KAGENT_DEVICE'? the keys are KAGENT_CACHE_DIR,")


def test_a_bad_value_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_THREADS", "many")
    with pytest.raises(ConfigError, match=r"^environment variable KAGENT_THREADS is 'many', expected a whole"):
        load_config()


# -- the file ------------------------------------------------------------------------------------------------


def test_kagent_toml(project: Path) -> None:
    (project / "kagent.toml").write_text(
        'device = "cuda:0"\nfusion-fuel = 3\nplugins_block = ["a", "b"]\n[placement]\n"aten::sort" = "cpu"\n'
    )
    assert load_config() == Config(
        device="cuda:0", fusion_fuel=3, plugins_block=("a", "b"), placement={"aten::sort": "cpu"}
    )


def test_pyproject_table(project: Path) -> None:
    (project / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.kagent]\nmissing-kernel = "error"\n')
    assert load_config() == Config(missing_kernel="error")


def test_kagent_toml_wins_over_pyproject_beside_it(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.kagent]\nthreads = 1\nfusion_fuel = 1\n")
    (project / "kagent.toml").write_text("threads = 2")
    assert load_config() == Config(threads=2)


def test_the_nearest_directory_upwards_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near = project / "package"
    inner = near / "deep" / "deeper"
    inner.mkdir(parents=True)
    (project / "kagent.toml").write_text("threads = 1")
    monkeypatch.chdir(inner)
    assert load_config().threads == 1
    (near / "pyproject.toml").write_text('[project]\nname = "kagent-user"\n')  # has nothing to say
    assert load_config().threads == 1
    (near / "pyproject.toml").write_text("[tool.kagent]\n")  # has: that everything is at its default
    assert load_config().threads is None


def test_relative_paths_start_at_the_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("USERPROFILE", "/home/somebody")
    (project / "sub").mkdir()
    (project / "kagent.toml").write_text('dump = "dumps"\ncache-dir = "~/cache"')
    monkeypatch.chdir(project / "sub")
    assert load_config().dump == project / "dumps"
    assert load_config().cache_dir == Path("/home/somebody/cache").absolute()


def test_a_named_file_replaces_the_found_one(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "kagent.toml").write_text("threads = 1")
    for number, name in enumerate(("variable.toml", "argument.toml"), start=2):
        (project / name).write_text(f"threads = {number}")
    monkeypatch.setenv("KAGENT_CONFIG", "variable.toml")
    assert load_config().threads == 2
    assert load_config(config_file="argument.toml").threads == 3
    assert load_config(config_file=os.devnull) == Config()


def test_a_named_pyproject_needs_the_table(project: Path) -> None:
    (project / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ConfigError, match=r"pyproject\.toml has no table \[tool\.kagent\]"):
        load_config(config_file=project / "pyproject.toml")


def test_a_named_file_that_is_not_there(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*lost\.toml: No such file") as caught:
        load_config(config_file=project / "lost.toml")
    assert "KAGENT_CONFIG" in (caught.value.hint or "")


def test_a_named_file_of_a_user_who_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot read the config file ~nobody-of-that-name/x"):
        load_config(config_file="~nobody-of-that-name/x")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps the current directory from being deleted")
def test_a_current_directory_that_was_deleted(project: Path) -> None:
    project.rmdir()
    assert load_config({"dump": "/d"}) == Config(dump="/d")
    with pytest.raises(ConfigError, match="option 'dump' is 'd', expected a path"):
        load_config({"dump": "d"})
    with pytest.raises(ConfigError, match=r"cannot read the config file x\.toml"):
        load_config(config_file="x.toml")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('devise = "cpu"', "devise"),
        ('[kernel]\n"aten::relu" = "relu.cl"', "kernel"),
        ("[tool.kagent]\nthreads = 1", "tool"),
    ],
)
def test_an_unknown_key_in_kagent_toml(text: str, key: str, project: Path) -> None:
    path = project / "kagent.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert caught.value.message == f"{path}: key '{key}' is no configuration key"
    assert "the keys are" in (caught.value.hint or "")


def test_an_unknown_key_in_pyproject_names_table_and_nearest_key(project: Path) -> None:
    path = project / "pyproject.toml"
    path.write_text("[tool.kagent]\nfusion-fule = 1")
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert caught.value.message == f"{path}: key 'tool.kagent.fusion-fule' is no configuration key"
    assert (caught.value.hint or "").startswith("did you mean 'fusion_fuel'?")


def test_a_bad_value_in_a_file_is_told_even_where_an_option_hides_it(project: Path) -> None:
    path = project / "kagent.toml"
    path.write_text("fusion-fuel = -1")
    with pytest.raises(ConfigError) as caught:
        load_config({"fusion_fuel": 3})
    assert caught.value.message == f"{path}: key 'fusion-fuel' is -1, expected a whole number of at least 0"


def test_a_key_in_two_spellings_in_a_file(project: Path) -> None:
    (project / "kagent.toml").write_text("fusion-fuel = 1\nfusion_fuel = 2")
    with pytest.raises(ConfigError, match="key 'fusion_fuel' repeats 'fusion-fuel'"):
        load_config()


@pytest.mark.parametrize("name", ["kagent.toml", "pyproject.toml"])
def test_a_syntax_error_names_file_and_line(name: str, project: Path) -> None:
    (project / name).write_text("# kagent\n\nthreads = = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert str(project / name) in caught.value.message
    assert "line 3" in caught.value.message


def test_a_broken_pyproject_of_somebody_else_is_not_ours(project: Path) -> None:
    (project / "pyproject.toml").write_text("name = = 1\n")
    assert load_config() == Config()


def test_tool_kagent_that_is_no_table(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool]\nkagent = 3\n")
    with pytest.raises(ConfigError, match=r"tool\.kagent is 3, expected a table"):
        load_config()


def test_text_encodings(project: Path) -> None:
    path = project / "kagent.toml"
    path.write_bytes("\ufeffthreads = 2  # größer\n".encode())  # with a byte order mark
    assert load_config().threads == 2
    path.write_bytes("threads = 2  # größer\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config()


# -- precedence and provenance -------------------------------------------------------------------------------


def test_option_over_environment_over_file_over_default(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "kagent.toml"
    path.write_text('device = "file"\nfallback-device = "file"\nthreads = 1\nplacement = {"aten::a" = "file"}')
    monkeypatch.setenv("KAGENT_DEVICE", "env")
    monkeypatch.setenv("KAGENT_FALLBACK_DEVICE", "env")
    monkeypatch.setenv("KAGENT_PLACEMENT", "aten::b=env")
    config, sources = load_config_with_sources({"device": "option"})
    assert config == Config(device="option", fallback_device="env", threads=1, placement={"aten::b": "env"})
    assert sources.keys() == Config.model_fields.keys()
    assert str(sources["device"]) == "option"
    assert str(sources["fallback_device"]) == "environment KAGENT_FALLBACK_DEVICE"
    assert sources["placement"] == Source("environment", "KAGENT_PLACEMENT")
    assert str(sources["threads"]) == f"file {path} [threads]"
    assert str(sources["fusion"]) == "default"


def test_provenance_spells_a_key_as_the_file_does(project: Path) -> None:
    path = project / "pyproject.toml"
    path.write_text("[tool.kagent]\nfusion-fuel = 1")
    _, sources = load_config_with_sources()
    assert str(sources["fusion_fuel"]) == f"file {path} [tool.kagent.fusion-fuel]"


def test_an_option_of_none_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGENT_THREADS", "3")
    config, sources = load_config_with_sources({"threads": None})
    assert config.threads is None
    assert sources["threads"].kind == "option"


def test_rows() -> None:
    options = {
        "placement": {"aten::a": "cpu", "aten::b": "cuda"},
        "plugins_block": ["x", "y"],
        "fusion": False,
    }
    rows = {row.key: row for row in config_rows(*load_config_with_sources(options))}
    assert rows.keys() == Config.model_fields.keys()
    assert rows["placement"].value == "aten::a=cpu,aten::b=cuda"
    assert rows["plugins_block"][:3] == ("plugins_block", "x,y", "option")
    assert rows["threads"][:3] == ("threads", "none", "default")
    assert rows["fusion"].value == "false"
    assert rows["device"].description.startswith("where operators run")


def test_a_row_reads_back_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(
        device="cuda:1",
        placement={"aten::a": "cpu"},
        plugins_allow=["x", "y"],
        fusion=False,
        threads=2,
        dump="/d",
    )
    for row in config_rows(config, {}):
        monkeypatch.setenv(f"KAGENT_{row.key.upper()}", row.value)
    assert load_config() == config


# -- the syntax of KAGENT_LOGS -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "levels"),
    [
        ("", {}),
        (" , ", {}),
        ("extract", {"extract": 10}),
        ("Extract=DEBUG, execute = trace", {"extract": 10, "execute": 5}),
        ("plugins=error,capture=warning,schedule=info", {"plugins": 40, "capture": 30, "schedule": 20}),
        ("extract=debug,extract=info", {"extract": 20}),
    ],
)
def test_log_spec(spec: str, levels: dict[str, int]) -> None:
    assert parse_log_spec(spec) == levels


@pytest.mark.parametrize("spec", ["info,execute=trace", "execute=trace,info"])
def test_a_bare_level_is_for_all_components_without_their_own(spec: str) -> None:
    levels = parse_log_spec(spec)
    assert levels.pop("execute") == 5
    assert levels == dict.fromkeys(("capture", "schedule", "extract", "profile", "plugins", "codegen"), 20)


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("extrat=debug", "unknown log component 'extrat' in 'extrat=debug'", "did you mean 'extract'?"),
        ("extract=debgu", "unknown log level 'debgu'", "did you mean 'debug'?"),
        ("extract=", "unknown log level ''", "use one of 'debug', 'error'"),
        ("=debug", "unknown log component ''", "use one of 'capture'"),
        ("debug=extract", "unknown log component 'debug'", "use one of 'capture'"),
        ("tracee", "unknown log component or level 'tracee'", "did you mean 'trace'?"),
        ("extract=debug=trace", "unknown log level 'debug=trace'", "use one of 'debug', 'error'"),
    ],
)
def test_a_bad_log_spec(spec: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_log_spec(spec)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_importing_config_and_logs_leaves_torch_alone() -> None:
    script = "import sys, kagent_core.config, kagent_core.inspect.logs; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=True)
