"""Real architectures at small sizes, with random weights."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kagent_core.config import load_config
from kagent_core.inspect.report import PlanReport
from kagent_core.session import session_for

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read by transformers when it is imported

OPTIONS = {"device": "cpu"}
BATCH = 2
TOKENS = 12
VOCABULARY = 128
IMAGE = 32
LABELS = 5
CLASSES = {"num_labels": LABELS, "problem_type": "single_label_classification"}
"""The kind of problem is stated: a model that finds out by itself writes it into its config, and is captured anew."""


# -- compiling


def compiled(model: Callable[..., Any], **changes: Any) -> Any:
    """Compile whole: a graph break would let eager PyTorch in unseen."""
    return torch.compile(model, backend="kagent", options=OPTIONS, fullgraph=True, **changes)


@contextmanager
def recorded_plans() -> Iterator[list[PlanReport]]:
    """Collect the report of every plan that is built inside the block."""
    reports = session_for(load_config(OPTIONS)).reports
    reports.clear()
    collected: list[PlanReport] = []
    try:
        yield collected
    finally:
        collected += reports


def graphs_captured() -> int:
    """How many graphs Dynamo has captured since its counters were cleared."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


# -- models


@dataclass(frozen=True)
class Case:
    """A model and its inputs.

    Attributes
    ----------
    build
        Makes the model, whose weights follow from torch's seed.
    inputs
        Makes the keyword arguments of a call, which follow from torch's seed, too.
    """

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, Any]]

    def model(self, seed: int = 0) -> torch.nn.Module:
        """Return a new model in evaluation mode; the same seed gives the same weights."""
        torch.manual_seed(seed)
        return randomized(self.build()).eval()

    def example(self, seed: int) -> dict[str, Any]:
        """Return inputs; the same seed gives the same ones."""
        torch.manual_seed(seed)
        return self.inputs()


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Give norms, biases and running statistics random values, so that mistakes do not cancel out.

    Convolutions get weights that keep the signal's size: at initial ones it vanishes in a deep network, and every
    input has the same result.
    """
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() == 1 and tensor.is_floating_point() and "freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
            elif tensor.dim() == 4:
                tensor.normal_(std=(2 / tensor[0].numel()) ** 0.5)
    return model


def images() -> dict[str, Any]:
    """Pixels of a small batch."""
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE)}


def padded_text(length: int = TOKENS) -> dict[str, Any]:
    """Token ids, the last texts' ends masked as padding."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[-1, length - length // 4 :] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (BATCH, length)), "attention_mask": mask}


def _resnet() -> torch.nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="bottleneck", **CLASSES)
    )


def _mobilenet() -> torch.nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config(depth_multiplier=0.25, image_size=IMAGE, **CLASSES))


def _vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=IMAGE,
            patch_size=8,
            **CLASSES,
        )
    )


def _convnext() -> torch.nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], image_size=IMAGE, **CLASSES)
    )


def bert_config(**changes: Any) -> Any:
    """Return the config of a two-layer BERT."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        **CLASSES,
        **changes,
    )


def _bert() -> torch.nn.Module:
    from transformers import BertModel

    return BertModel(bert_config())


def bert_classifier(**changes: Any) -> torch.nn.Module:
    """Return a BERT that classifies texts."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(bert_config(**changes))


def gpt2(**changes: Any) -> torch.nn.Module:
    """Return a two-layer GPT-2 with its language-model head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        **changes,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else it logs what it assumes, and Dynamo does not capture that
    return model


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def _t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def _t5_inputs() -> dict[str, Any]:
    return {**padded_text(), "decoder_input_ids": torch.randint(0, VOCABULARY, (BATCH, 7))}


def _whisper() -> torch.nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return WhisperEncoder(
        WhisperConfig(
            d_model=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            num_mel_bins=16,
            max_source_positions=20,
        )
    )


def _speech() -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 16, 40)}


CASES: Mapping[str, Case] = {
    "resnet": Case(_resnet, images),
    "mobilenet_v2": Case(_mobilenet, images),
    "vit": Case(_vit, images),
    "convnext": Case(_convnext, images),
    "bert": Case(_bert, padded_text),
    "gpt2": Case(gpt2, padded_text),
    "llama": Case(_llama, padded_text),
    "t5": Case(_t5, _t5_inputs),
    "whisper_encoder": Case(_whisper, _speech),
}


def outputs_of(model: Callable[..., Any], inputs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Call a model and return every tensor of its output."""
    result = model(**inputs)
    leaves: Sequence[Any] = result.to_tuple() if hasattr(result, "to_tuple") else (result,)
    return tuple(pytree.tree_leaves(leaves))


@functools.cache
def sentences() -> tuple[str, ...]:
    """Texts of different lengths."""
    return (
        "A kernel runs on a device.",
        "The scheduler gives every operator a device, and says why.",
        "How is the weather today?",
        "Memory is planned once for a plan and used again in every call that replays it.",
    )
