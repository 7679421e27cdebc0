#!/usr/bin/env python3
"""Train the small pretrained model that the tests adapt, on the Python standard library's own sources.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python scripts/make_tiny_model.py

About eight minutes on one idle core. Writes a directory in transformers' layout (bf16 safetensors, byte-level BPE
tokenizer with a ChatML template), the training log, and one held-out document for the tests. The text is the
running interpreter's library, so another Python version gives a slightly different model; with the same
interpreter, torch and thread count the run repeats itself.
"""

import argparse
import hashlib
import math
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Before torch and tokenizers read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 2048
END = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Left out: the test suite (17 MB, much of it data), the tables of the character encodings, and the language
# reference's text, which is the kind of prose that tests adapt *to*.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data", "__pycache__"}
# One document in this many is held out, chosen by the hash of its name.
HELD_OUT_EVERY = 24
# The held-out document that is kept for the unit test.
SNIPPET = "queue.py"

Log = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How to train. Lengths in tokens."""

    steps: int = 1200
    batch: int = 4
    sequence: int = 256
    peak_lr: float = 4e-3
    final_lr_share: float = 0.05
    warmup_steps: int = 60
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    log_every: int = 50
    evaluate_every: int = 200
    held_out_sequences: int = 64
    seed: int = 20260101

    def lr(self, step: int) -> float:
        """Learning rate of `step` (from 0): linear warm-up, then a cosine to `final_lr_share` of the peak."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.peak_lr * (self.final_lr_share + (1 - self.final_lr_share) * cosine)


def read_documents() -> tuple[dict[str, str], dict[str, str]]:
    """The library's modules as {name: text}: (training, held out). A module is in exactly one of the two."""
    root = Path(sysconfig.get_path("stdlib"))
    training: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED.intersection(name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        kept_out = name.as_posix() == SNIPPET or int.from_bytes(digest[:4], "big") % HELD_OUT_EVERY == 0
        if text.strip():
            (held_out if kept_out else training)[name.as_posix()] = text
    return training, held_out


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` entries; every byte string round-trips, and no BOS is added."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        extra_special_tokens=[TURN_START, TURN_END],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def pack(tokenizer: PreTrainedTokenizerFast, documents: dict[str, str]) -> torch.Tensor:
    """All documents as one int64 stream (N,), each followed by the end token."""
    end = tokenizer.eos_token_id
    ids: list[int] = []
    for text in documents.values():
        ids.extend(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        ids.append(end)
    return torch.tensor(ids, dtype=torch.int64)


def cut(stream: torch.Tensor, sequence: int) -> torch.Tensor:
    """Windows (W, sequence + 1) of a stream (N,): each window's last token is the next one's first."""
    return stream.unfold(0, sequence + 1, sequence)


def unigram_loss(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Nats per held-out token of the best model without context: training frequencies, add-one smoothed."""
    counts = torch.bincount(train, minlength=VOCABULARY).double() + 1
    return float(-(counts / counts.sum()).log()[held_out].mean())


def build_model(seed: int, end_id: int) -> LlamaForCausalLM:
    """A fresh 1.6 M parameter Llama: 6 layers of width 128, grouped-query attention, tied embeddings."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=448,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end_id,
            pad_token_id=end_id,
            use_cache=True,
        )
    )


def mean_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss (nats) over windows (B, T + 1)."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.inference_mode()
def evaluate(model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    """Mean loss (nats per token) over all windows (W, T + 1), without dropout or gradient."""
    model.eval()
    return sum(float(mean_loss(model, part)) * len(part) for part in windows.split(16)) / len(windows)


def make_optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms do not."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )


def train(
    model: LlamaForCausalLM, windows: torch.Tensor, held_out: torch.Tensor, recipe: Recipe, log: Log
) -> None:
    """Train in place on windows (W, T + 1) in a seeded order; logs the training and held-out loss."""
    optimizer = make_optimizer(model, recipe)
    order = torch.Generator().manual_seed(recipe.seed)
    epochs = math.ceil(recipe.steps * recipe.batch / len(windows))
    indices = torch.cat([torch.randperm(len(windows), generator=order) for _ in range(epochs)])
    started = time.monotonic()
    recent: list[float] = []
    log(f"step     0  held-out {evaluate(model, held_out):.4f}")
    for step in range(recipe.steps):
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr(step)
        loss = mean_loss(model, windows[indices[step * recipe.batch : (step + 1) * recipe.batch]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        recent.append(float(loss.detach()))
        done = step + 1
        if done % recipe.log_every == 0 or done == recipe.steps:
            line = f"step {done:5d}  loss {sum(recent) / len(recent):.4f}  lr {recipe.lr(step):.2e}"
            recent.clear()
            if done % recipe.evaluate_every == 0 or done == recipe.steps:
                line += f"  held-out {evaluate(model, held_out):.4f}"
            log(f"{line}  {time.monotonic() - started:.0f} s")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write model (bf16) and tokenizer in transformers' layout."""
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def make(out: Path, recipe: Recipe, log: Log) -> None:
    """The whole job: text, tokenizer, training, files under `out`."""
    training, held_out = read_documents()
    size = sum(len(text.encode()) for text in training.values())
    digest = hashlib.sha256("\0".join(training.values()).encode()).hexdigest()
    log(f"Python {platform.python_version()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    log(f"training text: {len(training)} modules, {size} bytes, sha256 {digest[:16]}")
    log(f"held-out text: {len(held_out)} modules")
    (out / "heldout.txt").write_text(held_out[SNIPPET], encoding="utf-8")

    tokenizer = train_tokenizer(list(training.values()))
    train_stream, held_stream = pack(tokenizer, training), pack(tokenizer, held_out)
    log(f"tokens: {len(train_stream)} training, {len(held_stream)} held-out")
    log(f"bytes per training token: {size / len(train_stream):.2f}")
    log(f"held-out loss of a uniform guess: {math.log(VOCABULARY):.4f} nats per token")
    log(f"held-out loss of unigrams: {unigram_loss(train_stream, held_stream):.4f} nats per token")

    model = build_model(recipe.seed, tokenizer.eos_token_id)
    log(f"{sum(p.numel() for p in model.parameters())} parameters; {recipe}")
    every = cut(held_stream, recipe.sequence)
    stride = max(1, len(every) // recipe.held_out_sequences)
    sample = every[::stride][: recipe.held_out_sequences]
    train(model, cut(train_stream, recipe.sequence), sample, recipe, log)
    save(model, tokenizer, out)
    # The saved values, computed with in fp32: few CPUs are quick in bf16.
    model.float()
    log(f"as saved (bf16 values): held-out sample {evaluate(model, sample):.4f}")
    log(f"as saved (bf16 values): all held-out text {evaluate(model, every):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).resolve().parent.parent / "tests" / "data" / "tiny"
    parser.add_argument("--out", type=Path, default=default, help="directory to write (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=Recipe.steps, help="training steps (default: %(default)s)"
    )
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: give at least 1")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "train.log").open("w", encoding="utf-8") as log_file:

        def log(line: str) -> None:
            for stream in (sys.stdout, log_file):
                print(line, file=stream, flush=True)

        make(options.out, Recipe(steps=options.steps), log)


if __name__ == "__main__":
    main()
