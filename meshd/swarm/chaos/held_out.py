"""Held-out loss of an exported checkpoint: by transformers, without any of the swarm's code for it."""

from __future__ import annotations

from pathlib import Path

from meshd.config.runspec import RunSpec


def held_out_loss(checkpoint: Path, data: Path, spec: RunSpec) -> float:
    """Nats per label token over the run's held-out sequences. data: the run's tokenized corpus. Blocking."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from meshd.data.dataset import Dataset

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for batch in Dataset.open(data).held_out_batches(spec.data.microbatch, spec.data.held_out_sequences):
            logits = model(batch.inputs).logits.flatten(0, 1)
            labels = batch.labels.masked_fill(~batch.label_mask, -100).flatten()
            total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            count += batch.label_tokens
    return total / count
