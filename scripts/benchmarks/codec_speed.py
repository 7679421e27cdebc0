"""What a codec's device half costs beside its matrix products, on one device, at any width.

    .venv/bin/python scripts/benchmarks/codec_speed.py [--device cuda] [--hidden 4096] [--tokens 8192]

Encoding and decoding of one tensor of a made-up boundary, each way; the products alone (basis and back, and the token
predictor) are measured in turn with it. The entropy coder's halves, which run in threads beside the device, are in a
column of their own. Saved by default as docs/results/codec_speed.json.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from results import ROOT, save
from torch import Tensor

from meshd.priors.boundary import Basis, BoundaryPrior, Direction, Packed
from meshd.priors.features import RANK, TokenFeatures
from meshd.wire import CodecContext, codec_named
from meshd.wire.entropy import Tables
from meshd.wire.side import side_of

VOCABULARY = 4096
OCTAVES = 10
"""That scales fall over."""


def made_prior(hidden: int, rank: int, generator: torch.Generator) -> BoundaryPrior:
    """A boundary of random orthonormal coordinates whose scales fall evenly."""

    def basis(back: bool) -> Basis:
        matrix = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q
        scale = (-64 * OCTAVES * torch.arange(hidden) / hidden).to(torch.int16)
        return Basis(Packed.of(matrix), Packed.of(matrix.T) if back else None, scale, Tables.default())

    zeros = torch.zeros(hidden)
    predictor = (torch.randn(rank + 1, hidden, generator=generator) / 16).bfloat16()
    draft = BoundaryPrior(0, 1, 0, zeros, predictor, 1e6, zeros.clone(), basis(back=True), basis(back=False))
    return draft.sealed()


def seconds(step: Callable[[], object], device: torch.device) -> float:
    began = perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - began


def measure(
    name: str, direction: Direction, x: Tensor, context: CodecContext, repeats: int
) -> dict[str, object]:
    """Medians over `repeats` turns, after one that warms up."""
    codec, device = codec_named(name), x.device
    prior = context.prior
    assert prior is not None
    assert context.features is not None
    side, features = side_of(prior, direction, device), context.features
    predictor = prior.on(device).predictor.float()

    def products() -> Tensor:
        known = features.features(context.ids.reshape(-1)) @ predictor[:-1] if direction == "forward" else 0
        return (x.float().reshape(-1, x.shape[-1]) - known) @ side.encode @ side.decode + known

    turns = []
    for _ in range(repeats + 1):
        alone = seconds(products, device)
        began = perf_counter()
        quantized = codec.quantize(x, context)
        encoding = perf_counter() - began
        began = perf_counter()
        frame = codec.write(quantized)
        received = codec.read(frame, context)
        coder = perf_counter() - began
        decoding = seconds(lambda got=received: codec.dequantize(got, context, device), device)
        turns.append((alone, encoding, decoding, coder))
    alone, encoding, decoding, coder = (median(column) for column in zip(*turns[1:], strict=True))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "hidden": x.shape[-1],
        "tokens": x.shape[:-1].numel(),
        "codec": name,
        "direction": direction,
        "products_ms": round(1e3 * alone, 2),
        "encode_ms": round(1e3 * encoding, 2),
        "decode_ms": round(1e3 * decoding, 2),
        "coder_ms": round(1e3 * coder, 2),
        "over_products": round((encoding + decoding) / alone, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/codec_speed.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device, generator = torch.device(given.device), torch.Generator().manual_seed(0)
    rank = min(RANK, given.hidden)
    prior = made_prior(given.hidden, rank, generator)
    features = TokenFeatures.from_embedding(torch.randn(VOCABULARY, rank, generator=generator), rank)
    ids = torch.randint(0, VOCABULARY, (8, given.tokens // 8), generator=generator)
    rows = []
    for direction, names in (
        ("forward", ("int8", "spectral:bits=1.46", "lloyd:bits=1.46")),
        ("backward", ("int8", "spectral:bits=0.5", "lloyd:bits=0.5")),
    ):
        coordinates = (
            torch.randn(*ids.shape, given.hidden, generator=generator) * prior.basis(direction).scale
        )
        x = (coordinates @ prior.basis(direction).decode.T).to(device, getattr(torch, given.dtype))
        context = CodecContext(0, direction, ids.to(device), 1, prior, features.on(device))
        for name in names:
            rows.append(measure(name, direction, x, context, given.repeats))
            print(rows[-1], flush=True)
    save(given.out, rows, dtype=given.dtype)


if __name__ == "__main__":
    main()
