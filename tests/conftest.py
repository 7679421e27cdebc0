"""Set-up shared by all tests: a quiet, deterministic process, and the committed model and text.

The environment is set here, at import time, because torch, tokenizers and grpc read it when *they* are
imported; processes that tests start inherit it.
"""

import os
from pathlib import Path

os.environ.update(
    # Tests run beside each other on few cores: spinning OpenMP threads would take turns at nothing.
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TOKENIZERS_PARALLELISM="false",
    # gRPC's fork handlers can hang a parent whose calls are in flight; nothing here forks.
    GRPC_ENABLE_FORK_SUPPORT="0",
    # Every model that a test needs is committed or made on the spot.
    HF_HUB_OFFLINE="1",
)

import pytest
import torch

torch.set_num_threads(1)

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Directory of a small pretrained Llama with its tokenizer; read-only (see its README.md)."""
    return DATA / "tiny"


@pytest.fixture(scope="session")
def adapt_text() -> Path:
    """Directory of `*.txt` prose that `tiny_model` never saw, one document a file; read-only."""
    return DATA / "adapt" / "text"
