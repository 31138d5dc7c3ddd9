"""The configuration's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from platformdirs import user_cache_path
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from kagent_core.config.kernels import ConfiguredKernels
from kagent_core.config.source import ENV_PREFIX, Source, bad_value, unknown_key
from kagent_core.config.values import (
    Device,
    DeviceTypes,
    Directory,
    FusionRules,
    LaunchConfigs,
    LogSpec,
    NamedDevice,
    Names,
    Nbytes,
    Number,
    Placement,
)


class Config(BaseSettings):
    """What kagent is told: frozen and hashable, so that it can be the key of a cache.

    ``Config(device="cpu")`` makes a value out of keywords alone; `load_config` also reads the environment and
    the project's file.

    Raises
    ------
    ConfigError
        For a key that does not exist or a value that does not fit.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,  # an empty variable counts as unset
        env_parse_none_str="none",
    )

    device: Device = Field(
        "auto", description="where operators run: TYPE, TYPE:INDEX, or auto for the best device there is"
    )
    fallback_device: NamedDevice = Field("cpu", description="where an operator runs for which the device has no kernel")
    missing_kernel: Literal["fallback", "error"] = Field(
        "fallback", description="what a missing kernel does: fallback (use the fallback device) or error"
    )
    compaction: bool = Field(
        True,
        description="whether tensors that a kernel does not take as they lie are copied into scratch that it takes",
    )
    placement: Annotated[Placement, NoDecode] = Field(
        Placement(), description="operators with a device of their own, such as aten::sort=cpu"
    )
    fusion: bool = Field(True, description="whether neighbouring operators may become one kernel")
    fusion_fuel: Number | None = Field(
        None, ge=0, description="fuse only the first N pairs, to find a fusion that is wrong; none: no limit"
    )
    fusion_rules: FusionRules | None = Field(
        None, description="the only rules by which operators may fuse, such as pointwise,views; none: all"
    )
    generated_kernels: Literal["auto", "all", "off"] = Field(
        "auto",
        description="where kernels are generated: auto (where they are at least as fast as the device's own), all "
        "(wherever they can be), or off",
    )
    fold_constants: bool = Field(
        True,
        description="whether, in inference, what depends on a model's parameters only is computed once, and again when "
        "they change",
    )
    half_rounding: Literal["operator", "kernel"] = Field(
        "operator",
        description="where generated kernels round float16 and bfloat16: after every operator, as eager PyTorch does, "
        "or only where a kernel ends",
    )
    float32_products: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="what, in inference, products and convolutions of float32 tensors with a model's weights are "
        "computed in: float32, or bfloat16 where the device has units for that, with results that are as exact as "
        "bfloat16 is",
    )
    random_numbers: Literal["auto", "device", "eager"] = Field(
        "auto",
        description="where random numbers come from: auto (eager PyTorch's where the device has PyTorch's kernels, "
        "else the device's), device (made on the device wherever a kernel can be generated), or eager",
    )
    launch_configs: Annotated[LaunchConfigs, NoDecode] = Field(
        LaunchConfigs(), description="kernels with a launch config of their own, such as aten::mm=4,4,1/16,16,1"
    )
    kernels: Annotated[ConfiguredKernels, NoDecode] = Field(
        ConfiguredKernels(),
        description="kernels of your own by signature, each a table with at least a device and a source file",
    )
    plugins_allow: Names | None = Field(None, description="the only plugins that may be loaded; none: all")
    plugins_block: Names = Field((), description="plugins that are never loaded")
    cache_dir: Directory = Field(
        default_factory=lambda: user_cache_path("kagent"),
        description="directory of compiled kernels and of timings",
    )
    logs: LogSpec = Field(
        "", description="what to log, such as extract=debug,execute=trace; a bare level is for everything"
    )
    dump: Directory | None = Field(None, description="directory that gets every extraction context as JSON")
    emulate: DeviceTypes = Field((), description="device types that may be emulated where the hardware is missing")
    parameters: Literal["checked", "version", "copied"] = Field(
        "checked",
        description="how a device with memory of its own gets a model's parameters: checked (copied when a fingerprint "
        "of their bytes has changed), version (copied when PyTorch's version counter has), or copied (at every call)",
    )
    device_memory_limit: Nbytes | None = Field(
        None,
        ge=1,
        description="the most memory that plans and parameters may take on a device, in bytes or such as 4GiB; none: "
        "what the device says it has",
    )
    plan_cache_size: Number = Field(32, ge=1, description="execution plans kept per captured graph")
    profile: bool = Field(False, description="whether every task is timed on every call")
    tuned: bool = Field(
        True, description="whether launch configs and tile sizes that were measured to be fast are used"
    )
    threads: Number | None = Field(None, ge=1, description="CPU threads per task; none: as many as torch is set to use")

    def __init__(self, /, _sources: Mapping[str, Source] | None = None, **values: Any) -> None:
        sources = {key: Source("option", key) for key in values} | dict(_sources or {})
        for key in values:
            if key not in type(self).model_fields:
                raise unknown_key(sources[key], type(self).model_fields)
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            field = type(self).model_fields[str(first["loc"][0])]
            raise bad_value(first, sources, field.description) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave the other sources to `load_config_with_sources`, which keeps track of who said what."""
        return (init_settings,)

    def replace(self, **changes: Any) -> Config:
        """Return a copy with other values for some keys, validated like any other config."""
        return Config(**({key: getattr(self, key) for key in Config.model_fields} | changes))

    def as_dict(self) -> dict[str, Any]:
        """Return the values as JSON can hold them: a path as a string, a tuple as a list."""
        return self.model_dump(mode="json")
