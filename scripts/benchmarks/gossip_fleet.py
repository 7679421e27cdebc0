"""Replicas of a pretrained Llama trained side by side in one process, for scripts/benchmarks/gossip.py."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from results import ROOT
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from meshd.config.runspec import OptimSpec
from meshd.data.known import known_corpus
from meshd.model.sources import resolve_source
from meshd.optim.schedule import learning_rate

TEXT = "packaged:manpages-de"
# One document in so many is held out; tokens of its windows that are measured.
HELD_OUT, HELD_COLUMNS = 20, 256


@dataclass(frozen=True)
class Training:
    """What all arms have in common. seq: tokens of a window. batch: windows that a replica steps on. held: those
    that are measured in the end."""

    model: str
    replicas: int
    steps: int
    lr: float
    seq: int
    batch: int
    held: int
    seed: int


@dataclass(frozen=True)
class Text:
    """Token ids, one document after the other: int64 (tokens,). NumPy, for processes to hand over as it is."""

    train: np.ndarray
    held: np.ndarray


def folder_of(model: str) -> Path:
    """Of a model of this repository or of any other source."""
    here = ROOT / model
    return resolve_source(str(here) if here.is_dir() else model)


def tokenized(folder: Path) -> Text:
    """The text in the tokens of a model, split by document."""
    logging.set_verbosity_error()  # documents are longer than the model's context, and are cut into windows
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with known_corpus(TEXT).open(encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    train: list[int] = []
    held: list[int] = []
    for number, ids in enumerate(tokenizer(documents)["input_ids"]):
        (train if number % HELD_OUT else held).extend([*ids, tokenizer.eos_token_id])
    return Text(np.array(train), np.array(held))


class Fleet:
    """Replicas of a Llama with tied, frozen embeddings, trained side by side: one batched product for each of their
    matrices. `values` (replicas, count) holds the trainable parameters by name, one replica a row."""

    def __init__(self, folder: Path, training: Training, text: Text) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.config = model.config
        if self.config.model_type != "llama" or not self.config.tie_word_embeddings:
            raise SystemExit(f"{training.model}: only Llamas with tied embeddings are trained here")
        found = {name: p.detach() for name, p in model.named_parameters() if "embed_tokens" not in name}
        self.embedding = model.model.embed_tokens.weight.detach()
        self.shapes = {name: found[name].shape for name in sorted(found)}
        self.start = torch.cat([found[name].reshape(-1) for name in self.shapes])
        self.training, self.count = training, len(self.start)
        self.values = self.start.repeat(training.replicas, 1)
        self._gradients = torch.zeros_like(self.values)
        self._parameters = self.named(self.values)
        for parameter, gradient in zip(
            self._parameters.values(), self.named(self._gradients).values(), strict=True
        ):
            parameter.requires_grad_().grad = gradient
        self.values.grad = self._gradients
        self._schedule = OptimSpec(lr=training.lr, warmup_steps=20, clip=1.0)
        # Of one flat matrix: AdamW takes every value by itself, whichever replica it is of.
        self.adamw = torch.optim.AdamW(
            [self.values], lr=training.lr, betas=self._schedule.betas, weight_decay=0.0, fused=True
        )
        self._draws = [
            torch.Generator().manual_seed(training.seed * 1000 + replica)
            for replica in range(training.replicas)
        ]
        self._train, self._held = torch.from_numpy(text.train), torch.from_numpy(text.held)
        self._cosine, self._sine = self._rotations(max(training.seq, HELD_COLUMNS))

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Views (rows, ...) of a matrix (rows, count)."""
        pieces = rows.split([shape.numel() for shape in self.shapes.values()], dim=1)
        return {
            name: piece.view(len(rows), *shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def step(self, number: int) -> float:
        """One inner step of every replica. Returns their mean loss."""
        seq, batch = self.training.seq, self.training.batch
        ids = torch.stack([self._windows(draw, batch, seq) for draw in self._draws])
        losses = self._losses(ids, self._parameters)
        self._gradients.zero_()
        losses.sum().backward()
        norms = self._gradients.norm(dim=1, keepdim=True)
        self._gradients.mul_((self._schedule.clip / norms).clamp_(max=1.0))
        self.adamw.param_groups[0]["lr"] = learning_rate(self._schedule, number, self.training.steps)
        self.adamw.step()
        return losses.mean().item()

    def moments(self) -> list[Tensor]:
        """AdamW's: (replicas, count) each, none before the first step."""
        state = self.adamw.state[self.values]
        return [state["exp_avg"], state["exp_avg_sq"]] if state else []

    @torch.no_grad()
    def held_out(self, rows: Tensor) -> list[float]:
        """Loss on held-out text of each row of values. rows: (rows, count)."""
        firsts = torch.linspace(0, len(self._held) - HELD_COLUMNS - 1, self.training.held).long()
        windows = torch.stack([self._held[first : first + HELD_COLUMNS + 1] for first in firsts.tolist()])
        found = []
        for row in rows:
            parameters = self.named(row[None])
            losses = [self._losses(few[None], parameters) for few in windows.split(4)]
            found.append(torch.cat(losses).mean().item())
        return found

    def _windows(self, draw: torch.Generator, batch: int, seq: int) -> Tensor:
        firsts = torch.randint(0, len(self._train) - seq, (batch,), generator=draw)
        return torch.stack([self._train[first : first + seq + 1] for first in firsts.tolist()])

    def _losses(self, ids: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """Mean loss of each replica: (replicas,). ids: (replicas, batch, seq + 1)."""
        logits = self._logits(ids[:, :, :-1], parameters)
        losses = F.cross_entropy(logits.flatten(0, 2), ids[:, :, 1:].flatten(), reduction="none")
        return losses.view(len(ids), -1).mean(1)

    def _logits(self, ids: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """As transformers' Llama gives them. ids: (replicas, batch, seq)."""
        hidden = self.embedding[ids].flatten(1, 2)
        for layer in range(self.config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            weights = {
                name.removeprefix(prefix).removesuffix(".weight"): weight
                for name, weight in parameters.items()
                if name.startswith(prefix)
            }
            normed = self._normed(hidden, weights["input_layernorm"])
            hidden = hidden + self._attention(normed, weights, ids.shape)
            normed = self._normed(hidden, weights["post_attention_layernorm"])
            gate = F.silu(_times(normed, weights["mlp.gate_proj"]))
            hidden = hidden + _times(gate * _times(normed, weights["mlp.up_proj"]), weights["mlp.down_proj"])
        return (self._normed(hidden, parameters["model.norm.weight"]) @ self.embedding.t()).view(
            *ids.shape, -1
        )

    def _attention(self, hidden: Tensor, weights: dict[str, Tensor], shape: torch.Size) -> Tensor:
        replicas, batch, seq = shape
        query, key, value = (
            _times(hidden, weights[f"self_attn.{which}_proj"])
            .view(replicas * batch, seq, -1, self.config.head_dim)
            .transpose(1, 2)
            for which in "qkv"
        )
        out = F.scaled_dot_product_attention(
            self._rotated(query), self._rotated(key), value, is_causal=True, enable_gqa=True
        )
        joined = out.transpose(1, 2).reshape(replicas, batch * seq, -1)
        return _times(joined, weights["self_attn.o_proj"])

    def _rotations(self, seq: int) -> tuple[Tensor, Tensor]:
        width = self.config.head_dim
        frequencies = self.config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(seq).float(), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _rotated(self, heads: Tensor) -> Tensor:
        seq, half = heads.shape[-2], heads.shape[-1] // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
        return heads * self._cosine[:seq] + turned * self._sine[:seq]

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return hidden * scale * weight[:, None]


def _times(hidden: Tensor, weight: Tensor) -> Tensor:
    """(replicas, tokens, out) from (replicas, tokens, in) and (replicas, out, in)."""
    return torch.bmm(hidden, weight.transpose(1, 2))
