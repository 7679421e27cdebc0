"""What codecs at the boundaries cost a pretrained model: bytes, loss and the gradients of its stages.

    .venv/bin/python scripts/benchmarks/codec.py [--batches 8] [--out docs/results/codec.json]

SmolLM2-135M cut in 4; text far from its training data (German manual pages). Priors are fitted on other documents than
those measured. Every codec writes and reads real frames at every boundary, in both directions; bytes are those of
headers, payloads and token ids, against bf16 values alone. cosine: of each stage's gradient to the uncompressed one of
the same minibatch, averaged over batches; cost_share: encoding and decoding, of forward and backward without codecs.
Needs the packaged model and text (about 100 MB from package registries, once). About 10 minutes on two cores.
"""

import argparse
import itertools
import json
import os
import random
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from results import ROOT, save
from transformers import AutoTokenizer, LlamaForCausalLM

from meshd.data.known import known_corpus
from meshd.model.sources import resolve_source
from meshd.priors.features import TokenFeatures
from meshd.priors.fit import fit
from meshd.priors.stats import BoundaryStats
from meshd.wire import CodecContext, codec_named
from meshd.wire.autograd import Boundary

MODEL, TEXT, STAGES = "packaged:smollm2-135m", "packaged:manpages-de", 4
ROWS, COLUMNS = 4, 128
# (forward, backward) by boundary
CODECS: dict[str, list[tuple[str, str]]] = {
    "dense": [("dense", "dense")] * 3,
    "spectral 16x": [("spectral:bits=1.42", "spectral:bits=0.5")] * 3,
    "spectral 32x": [("spectral:bits=0.72", "spectral:bits=0.24")] * 3,
    "lloyd 16x": [("lloyd:bits=1.42", "lloyd:bits=0.5")] * 3,
    "topk 16x": [("topk:keep=0.072", "topk:keep=0.072")] * 3,
    "random 10x (faithful)": [("random:keep=0.1", "random:keep=0.1")] * 3,
}


class Tap(torch.autograd.Function):
    """Shows `store` a clean boundary tensor and its gradient."""

    @staticmethod
    def forward(ctx, hidden, store):
        ctx.hidden, ctx.store = hidden, store
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        ctx.store(ctx.hidden, gradient)
        return gradient, None


def loss_of(model, ids, at_boundary):
    """ids: (rows, columns + 1). at_boundary(hidden, boundary) replaces what crosses."""
    body, inputs = model.model, ids[:, :-1]
    cuts = [round(i * len(body.layers) / STAGES) for i in range(1, STAGES)]
    hidden = body.embed_tokens(inputs)
    position = torch.arange(inputs.shape[1])[None]
    rotary = body.rotary_emb(hidden, position)
    for i, layer in enumerate(body.layers):
        if i in cuts:
            hidden = at_boundary(hidden, cuts.index(i))
        out = layer(hidden, attention_mask=None, position_ids=position, position_embeddings=rotary)
        hidden = out[0] if isinstance(out, tuple) else out
    logits = model.lm_head(body.norm(hidden))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def gradients(model) -> list[torch.Tensor]:
    """Each stage's gradient of its layers, flat, bf16 (to hold those of all batches)."""
    layers = model.model.layers
    edges = [round(i * len(layers) / STAGES) for i in range(STAGES + 1)]
    return [
        torch.cat([p.grad.flatten().bfloat16() for layer in layers[a:b] for p in layer.parameters()])
        for a, b in itertools.pairwise(edges)
    ]


def batches(tokenizer, documents: list[str], count: int) -> list[torch.Tensor]:
    """Sequences cut from packed documents, in mixed order."""
    need, ids = 3 * count * ROWS * (COLUMNS + 1), []
    for document in documents:
        ids += tokenizer(document).input_ids
        if len(ids) >= need:
            break
    rows = [ids[i : i + COLUMNS + 1] for i in range(0, len(ids) - COLUMNS, COLUMNS + 1)]
    random.Random(1).shuffle(rows)
    return list(torch.tensor(rows[: count * ROWS]).split(ROWS))


def fitted(model, features, text: list[torch.Tensor]):
    """One prior a boundary, from clean passes."""
    hidden = model.config.hidden_size
    stats = [BoundaryStats(features, hidden, seed=i) for i in range(STAGES - 1)]
    for ids in text:
        inputs = ids[:, :-1]

        def tap(h, i, inputs=inputs):
            return Tap.apply(h, lambda h, g: stats[i].add(h.flatten(0, 1), g.flatten(0, 1), inputs.flatten()))

        loss_of(model, ids, tap).backward()
    return [fit(stat, i) for i, stat in enumerate(stats)]


def measure(model, codecs, text, clean, priors, features) -> dict:
    """One row of the table."""
    spent = {"bytes": 0, "s": 0.0}

    def count(frame, context):
        spent["bytes"] += len(frame.payload) + frame.header.ByteSize()

    crossings = [Boundary(codec_named(there), codec_named(back), on_frame=count) for there, back in codecs]
    timed = [Timed(crossing, spent) for crossing in crossings]
    losses, cosines = [], []
    for number, ids in enumerate(text):
        model.zero_grad()

        def cross(h, i, ids=ids, number=number):
            context = CodecContext(i, "forward", ids[:, :-1], number, priors[i], features)
            return timed[i](h, context)

        loss = loss_of(model, ids, cross)
        loss.backward()
        losses.append(loss.item())
        cosines.append(
            [
                torch.nn.functional.cosine_similarity(a.double(), b.double(), 0).item()  # 30 M values each
                for a, b in zip(gradients(model), clean[number], strict=True)
            ]
        )
    tokens = len(text) * ROWS * COLUMNS
    by_stage = torch.tensor(cosines).mean(0)
    ids_bytes = 2 * (STAGES - 1) * tokens  # 16 bits each, once a boundary
    per_token = (spent["bytes"] + ids_bytes) / tokens / (STAGES - 1)
    return {
        "bits": ["/".join(name.partition("bits=")[2] or "-" for name in pair) for pair in codecs],
        "bytes_per_token": round(per_token, 1),
        "ratio_bf16": round(4 * model.config.hidden_size / per_token, 2),
        "loss": round(sum(losses) / len(losses), 4),
        "cosine_stages": [round(x, 3) for x in by_stage.tolist()],
        "cosine_mean": round(float(by_stage.mean()), 4),
        "cosine_min": round(float(by_stage.min()), 4),
        "codec_s": round(spent["s"], 2),
    }


class Timed:
    """Adds the time of the codecs of one boundary to `spent`."""

    def __init__(self, crossing: Boundary, spent: dict) -> None:
        self._crossing, self._spent = crossing, spent
        crossed = crossing._crossed

        def timed(*arguments):
            began = time.perf_counter()
            out = crossed(*arguments)
            spent["s"] += time.perf_counter() - began
            return out

        crossing._crossed = timed

    def __call__(self, hidden, context):
        return self._crossing(hidden, context)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=8, help="of 4 x 128 tokens, measured")
    parser.add_argument("--fit", type=int, default=32, help="batches that priors are fitted on")
    parser.add_argument("--rank", type=int, default=256, help="token features")
    parser.add_argument("--text", default=TEXT, help="known corpus")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/codec.json")
    options = parser.parse_args()
    folder = resolve_source(MODEL)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = [json.loads(line)["text"] for line in known_corpus(options.text).open()]
    random.Random(0).shuffle(documents)
    half = len(documents) // 2
    features = TokenFeatures.from_embedding(model.get_input_embeddings().weight.detach(), options.rank)
    priors = fitted(model, features, batches(tokenizer, documents[:half], options.fit))
    text = batches(tokenizer, documents[half:], options.batches)
    clean, losses, began = [], [], time.perf_counter()
    for ids in text:
        model.zero_grad()
        loss = loss_of(model, ids, lambda h, i: h)
        loss.backward()
        losses.append(loss.item())
        clean.append(gradients(model))
    alone_s = time.perf_counter() - began
    rows = []
    for name, codecs in CODECS.items():
        row = measure(model, codecs, text, clean, priors, features)
        row |= {"model": MODEL, "codec": name, "loss_dense": round(sum(losses) / len(losses), 4)}
        row["cost_share"] = round(row.pop("codec_s") / alone_s, 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
    save(options.out, rows, prior_bytes=[len(prior.to_bytes()) for prior in priors])


if __name__ == "__main__":
    main()
