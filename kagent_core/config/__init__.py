"""Configuration: one frozen value, read from three sources.

In this order, the first that names a key wins:

1. keywords: ``torch.compile(model, backend="kagent", options={"device": "opencl:0"})``;
2. the environment: ``KAGENT_DEVICE=opencl:0``; an empty variable counts as unset, ``none`` is no value;
3. the project's file: ``kagent.toml``, or the table ``[tool.kagent]`` of ``pyproject.toml``. The nearest
   directory that has either, from the current one upwards, counts; where both are in one directory,
   ``kagent.toml`` wins. The argument `config_file` or the variable ``KAGENT_CONFIG`` names a file instead
   (``/dev/null``: none).

A value replaces the value of a lower source as a whole; lists and tables are not merged. Options and
files may write a key with hyphens. A relative path in a file starts at the file's directory. Every source is
checked, even where a higher one overrides it: a typo is never silent.

Where to look: `logspec` and `values` (what a value may be), `source` (where one came from), `model` (the
keys), `load` (reading them).
"""

from kagent_core.config.kernels import ConfiguredKernels, KernelEntry
from kagent_core.config.load import ConfigRow, config_rows, load_config, load_config_with_sources
from kagent_core.config.logspec import LOG_COMPONENTS, LOG_LEVELS, TRACE, parse_log_spec
from kagent_core.config.model import Config
from kagent_core.config.source import Source
from kagent_core.config.values import FUSION_RULES, LaunchConfigs, Placement

__all__ = [
    "FUSION_RULES",
    "LOG_COMPONENTS",
    "LOG_LEVELS",
    "TRACE",
    "Config",
    "ConfigRow",
    "ConfiguredKernels",
    "KernelEntry",
    "LaunchConfigs",
    "Placement",
    "Source",
    "config_rows",
    "load_config",
    "load_config_with_sources",
    "parse_log_spec",
]
