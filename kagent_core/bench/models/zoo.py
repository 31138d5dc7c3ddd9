"""The models of the benchmark: real architectures, built offline; all but one have random weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from kagent_core.bench.models.networks import LastState, MobileNetV3Small, UNet, layers
from kagent_core.cli.needs import load_program, program_arguments
from kagent_core.errors import KagentError

Made = tuple[nn.Module, tuple[Any, ...]]

_IMAGE, _WIDTH, _DEPTH = 224, 256, 4


@dataclass(frozen=True)
class ZooModel:
    """One model.

    Attributes
    ----------
    name
        As ``--models`` gives it.
    what
        Its inputs, in words, after the batch.
    batch
        Images, texts or rows of a call, if ``--batch`` does not say how many.
    make
        Given the batch, returns the module and the arguments of a call.
    """

    name: str
    what: str
    batch: int
    make: Callable[[int], Made]

    def build(self, batch: int | None = None) -> Made:
        """Return the module, ready for inference, and the arguments; the same ones in every process.

        Raises
        ------
        KagentError
            When a package that it is made of is not installed.
        """
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            module, args = self.make(self.batch if batch is None else batch)
            _settle_statistics(module)
        return module.eval(), args


def _settle_statistics(module: nn.Module) -> None:
    """Give batch norms statistics that are not 0 and 1, as after training, so that folding them is work."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)


class OneTensor(nn.Module):
    """A model of transformers that takes one tensor and returns one: a field of what the model returns."""

    def __init__(self, model: nn.Module, field: str) -> None:
        super().__init__()
        self.model = model
        self.field = field

    def forward(self, x: Tensor) -> Tensor:
        """Return the field."""
        tensor: Tensor = getattr(self.model(x), self.field)
        return tensor


def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise KagentError("the model needs transformers, not installed here", hint="pip install 'kagent-torch[demo]'")
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return transformers


def _vision(name: str, field: str = "last_hidden_state", **config: Any) -> Callable[[int], Made]:
    def make(batch: int) -> Made:
        library = _transformers()
        model = getattr(library, f"{name}Model")(getattr(library, f"{name}Config")(**config))
        return OneTensor(model, field), (torch.randn(batch, 3, _IMAGE, _IMAGE),)

    return make


def _text(model: str, config: str, field: str, length: int, **values: Any) -> Callable[[int], Made]:
    def make(batch: int) -> Made:
        library = _transformers()
        settings = getattr(library, config)(**values)
        module = OneTensor(getattr(library, model)(settings), field)
        return module, (torch.randint(0, settings.vocab_size, (batch, length)),)

    return make


def _minilm(batch: int) -> Made:
    from kagent_core.demo.encoder import load_encoder

    model, _ = load_encoder()
    tokens = torch.randint(1000, 20000, (batch, 32))
    return model, (tokens, torch.ones_like(tokens))


_SQUARE = f"of {_IMAGE} × {_IMAGE}"

MODELS = (
    ZooModel(
        "resnet18",
        f"images {_SQUARE}",
        1,
        _vision("ResNet", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"),
    ),
    ZooModel("resnet26", f"images {_SQUARE}, bottleneck blocks", 1, _vision("ResNet", depths=[2, 2, 2, 2])),
    ZooModel("mobilenetv2", f"images {_SQUARE}", 1, _vision("MobileNetV2", tf_padding=False)),
    ZooModel(
        "mobilenetv3",
        f"images {_SQUARE}, the small variant",
        1,
        lambda batch: (MobileNetV3Small(), (torch.randn(batch, 3, _IMAGE, _IMAGE),)),
    ),
    ZooModel(
        "efficientnet",
        f"images {_SQUARE}, B0",
        1,
        _vision("EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, image_size=_IMAGE),
    ),
    ZooModel(
        "convnext",
        f"images {_SQUARE}, atto",
        1,
        _vision("ConvNext", hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2]),
    ),
    ZooModel(
        "vit",
        f"images {_SQUARE}, tiny",
        1,
        _vision("ViT", hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768),
    ),
    ZooModel(
        "swin",
        f"images {_SQUARE}, 4 stages of 2 layers, width 48",
        1,
        _vision("Swin", embed_dim=48, depths=[2, 2, 2, 2], num_heads=[2, 4, 8, 16]),
    ),
    ZooModel(
        "bert",
        f"texts of 64 tokens, {_DEPTH} layers of {_WIDTH}",
        4,
        _text(
            "BertModel",
            "BertConfig",
            "last_hidden_state",
            64,
            hidden_size=_WIDTH,
            num_hidden_layers=_DEPTH,
            num_attention_heads=4,
            intermediate_size=4 * _WIDTH,
        ),
    ),
    ZooModel("minilm", "texts of 32 tokens, real weights", 8, _minilm),
    ZooModel(
        "gpt2",
        f"texts of 128 tokens, {_DEPTH} layers of {_WIDTH}, logits of all",
        1,
        _text("GPT2LMHeadModel", "GPT2Config", "logits", 128, n_embd=_WIDTH, n_layer=_DEPTH, n_head=4, use_cache=False),
    ),
    ZooModel(
        "llama",
        f"texts of 128 tokens, {_DEPTH} layers of {_WIDTH}, 8 heads and 2 of keys, logits of all",
        1,
        _text(
            "LlamaForCausalLM",
            "LlamaConfig",
            "logits",
            128,
            hidden_size=_WIDTH,
            num_hidden_layers=_DEPTH,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=688,
            vocab_size=8000,
            use_cache=False,
        ),
    ),
    ZooModel(
        "layers",
        "rows, 8 × (linear, gelu, layer norm) of 512",
        64,
        lambda batch: (layers(512, 8), (torch.randn(batch, 512),)),
    ),
    ZooModel("unet", "images of 128 × 128", 1, lambda batch: (UNet(), (torch.randn(batch, 3, 128, 128),))),
    ZooModel(
        "lstm",
        f"sequences of 64 steps, 2 layers of {_WIDTH}",
        8,
        lambda batch: (LastState(_WIDTH), (torch.randn(batch, 64, _WIDTH),)),
    ),
)
"""All models, in the order in which they are printed."""

BY_NAME: Mapping[str, ZooModel] = MappingProxyType({model.name: model for model in MODELS})


class ByName(nn.Module):
    """A model that takes its arguments by name, called with their values in order."""

    def __init__(self, model: Callable[..., Any], names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *args: Any) -> Any:
        """Return what the model returns."""
        return self.model(**dict(zip(self.names, args, strict=True)))


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Return what the function returns."""
        return self.function(*args)


def model_of_file(program: str) -> ZooModel:
    """Return the model that ``FILE.py:FUNCTION`` names: the function returns it and its inputs.

    Parameters
    ----------
    program
        See `kagent_core.cli.needs.load_program`. Inputs are a tensor, a tuple of them, or a mapping by name.

    Raises
    ------
    KagentError
        Later, when it is built: the file cannot be read, or does not define what it should.
    """

    def make(batch: int) -> Made:
        model, inputs = load_program(program)
        args, named = program_arguments(inputs)
        if named:
            return ByName(model, tuple(named)), tuple(named.values())
        return model if isinstance(model, nn.Module) else Function(model), tuple(args)

    path, _, function = program.rpartition(":")
    return ZooModel(function if path else Path(program).stem, program, 0, make)
