"""The run spec: one adaptation job, as TOML.

`RunSpec` is what an operator writes. `meshd run` resolves it (measures a cut, hashes model and data) into a
`ResolvedRun`, which every peer of the run holds byte for byte and whose hash is the run id (DESIGN section 1).
Loading and messages are in `meshd.config.load`; the commented template is in `meshd.config.template`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Table(BaseModel):
    """A TOML table: unknown fields are errors, values are frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSpec(Table):
    """The base model and how it is cut."""

    source: str = Field(
        description="`packaged:smollm2-135m`, `hub:ORG/NAME`, or a local directory with safetensors"
    )
    revision: str | None = Field(None, description="hub revision (branch, tag or commit); hub sources only")
    stages: int = Field(2, ge=1, le=256, description="number of pipeline stages")
    cut: list[int] | None = Field(
        None,
        description="first layer of every stage but the first, ascending; left out: balanced from measured layer cost",
    )
    tied: Literal["auto", "ring", "freeze"] = Field(
        "auto",
        description="tied embeddings: `ring` trains them on stage 0, which also holds norm and head; `freeze` leaves "
        "them as they are; `auto` takes the measured default. No effect on a model with untied embeddings",
    )
    weights_from: Literal["peers", "source"] = Field(
        "peers",
        description="where a joiner takes base weights and tokenizer: from peers, or from `source` itself",
    )


class DataSpec(Table):
    """The text that is trained on."""

    kind: Literal["text", "sft"] = Field(
        "text", description="`text`: continue documents; `sft`: jsonl of prompt/response or chat messages"
    )
    sources: list[str] = Field(
        min_length=1,
        description="files, directories, globs (.txt, .md, .jsonl, ...), `hf:NAME[:CONFIG]` or `packaged:NAME`",
    )
    text_field: str = Field("text", description="field of a jsonl or Hugging Face row that holds the text")
    seq_len: int = Field(256, ge=8, le=131_072, description="tokens per sequence")
    microbatch: int = Field(4, ge=1, le=1024, description="sequences per microbatch")
    packing: Literal["concat", "separate"] = Field(
        "concat", description="`separate`: documents packed into one sequence do not attend to each other"
    )
    held_out: Annotated[float, Field(gt=0.0, lt=0.5)] = Field(
        0.05, description="share of documents that is never trained on"
    )
    held_out_sequences: int = Field(
        64, ge=1, le=100_000, description="sequences evaluated, at most; taken from the held-out documents"
    )
    split_seed: int = Field(0, ge=0, description="seed of the split by document")


class OptimSpec(Table):
    """The inner optimizer. One inner step happens per `inner_batch` sequences over all replicas of a stage."""

    kind: Literal["adamw"] = Field("adamw", description="AdamW; its moments stay with the peer")
    lr: float = Field(2e-5, gt=0.0, le=1.0, description="peak learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="decay of AdamW's first and second moment"
    )
    eps: float = Field(1e-8, gt=0.0, description="added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0.0, description="decoupled; not applied to vectors (norms, biases)")
    schedule: Literal["constant", "cosine", "linear"] = Field("cosine", description="shape after the warm-up")
    warmup_steps: int = Field(10, ge=0, description="inner steps over which the rate rises linearly to `lr`")
    min_lr_ratio: Fraction = Field(0.1, description="the schedule's end as a share of `lr`")
    clip: float = Field(1.0, ge=0.0, description="gradient norm per stage; 0 switches clipping off")
    inner_batch: int = Field(
        32,
        ge=1,
        description="sequences per inner step, over all replicas; batch_tokens = inner_batch * seq_len",
    )
    max_lag: int = Field(
        8,
        ge=0,
        description="a microbatch whose weights are older than this many steps on its way back is dropped",
    )


class BoundarySpec(Table):
    """Codec of one boundary (or of all), by direction."""

    forward: str = Field(
        "dense",
        description="codec of activations: `dense` (bf16), `dense32` (fp32), `int8`, `int4`, `random:keep=0.1`, "
        "`topk:keep=0.1`, `spectral:bits=1.5`, `lloyd:bits=1.5` (docs/codecs.md)",
    )
    backward: str = Field("dense", description="codec of gradients, same names")


class WireSpec(BoundarySpec):
    """Codecs on the wire; `boundary.N` overrides boundary N (between stage N and N + 1)."""

    boundary: dict[int, BoundarySpec] = Field(
        default_factory=dict, description="codecs of boundary N, between stage N and N + 1"
    )
    safe: Literal["int8", "int4", "dense", "dense32"] = Field(
        "int8", description="codec of a boundary whose codecs need a prior, while it has none"
    )
    prior_tokens: int = Field(
        16_384,
        ge=1,
        le=2**24,
        description="tokens that are measured at a boundary before a prior is fitted; at least the hidden size",
    )
    exact_adjoint: bool = Field(
        False,
        description="multiply gradients by the transpose of the codec's linear part; else they pass straight through",
    )


class GossipSpec(Table):
    """Averaging between the replicas of a stage."""

    every: int = Field(1, ge=1, description="inner steps between exchanges that a peer starts")
    subset: int = Field(1, ge=1, le=4096, description="an exchange covers one value of so many; 1: all")
    bits: Literal[2, 3, 4, 8, 16] = Field(
        16, description="of a value on the wire: 16 (bf16), or 8, 4, 3, 2 (docs/gossip.md)"
    )
    bps: int = Field(
        0,
        ge=0,
        description="bits a second that a peer sends in its exchanges, about: sets `subset` by the measured time of a "
        "step; 0: no such bound",
    )
    outer_momentum: float = Field(
        0.0, ge=0.0, lt=1.0, description="Nesterov momentum over exchanges (docs/gossip.md); 0: none"
    )
    timeout_s: float = Field(20.0, gt=0.0, description="an exchange without progress for so long is given up")


class AnchorSpec(Table):
    """Anchors: clean passes, the priors that come of them, and what the stages do with those (docs/priors.md)."""

    refresh_steps: int = Field(20, ge=1, description="inner steps between priors that an anchor publishes")
    passes: int = Field(
        8, ge=1, le=1024, description="clean microbatches that an anchor measures per refresh"
    )
    rank: int = Field(32, ge=1, le=256, description="singular triplets of a weight's gradient that cross")
    corrector: str = Field(
        "inject:lambda=0.15",
        description="what stages make of their gradients with weight priors: `inject`, `filter`, `wiener`, `signed`, "
        "`bias`, or `none`",
    )
    half_life_steps: float = Field(
        20.0, gt=0.0, le=1e9, description="inner steps in which a weight prior loses half of its say"
    )
    max_staleness_steps: int = Field(40, ge=1, description="a weight prior older than this is dropped")
    max_staleness_s: float = Field(
        3600.0,
        gt=0.0,
        description="the same in seconds; without a codec prior for so long, senders fit their own",
    )
    bps: int = Field(0, ge=0, description="bits a second that a peer uploads of priors, at most; 0: no bound")


class PipelineSpec(Table):
    """Flow of microbatches."""

    in_flight: int = Field(
        0, ge=0, le=1024, description="microbatches an injector keeps in flight; 0: two per stage"
    )
    lockstep: bool = Field(
        False, description="drain the pipeline at every inner step: exact, slow; needs one replica per stage"
    )
    recompute: bool = Field(
        True, description="recompute activations in backward; false keeps the graph in memory"
    )
    store_mb: int = Field(
        512, ge=1, description="encoded inputs that a peer may hold, MB; beyond it answers BUSY"
    )


class SnapshotSpec(Table):
    """Snapshots, evaluation and the end of the run. All go by globally committed label tokens."""

    every_tokens: int = Field(500_000, ge=1, description="tokens between snapshots")
    keep: int = Field(2, ge=1, le=100, description="snapshots kept per stage, newest first")
    evaluate: bool = Field(True, description="held-out loss of every complete snapshot, through the pipeline")


class StopSpec(Table):
    """When the run ends. At least one."""

    tokens: int | None = Field(None, ge=1, description="globally committed label tokens")
    steps: int | None = Field(None, ge=1, description="inner steps (of inner_batch sequences)")

    @model_validator(mode="after")
    def _one(self) -> StopSpec:
        if self.tokens is None and self.steps is None:
            raise ValueError("give stop.tokens or stop.steps")
        return self


class RunSpec(Table):
    """One adaptation job, as its operator writes it."""

    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="for people; part of the id"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="of everything random in the run: data order, dropout")
    model: ModelSpec
    data: DataSpec
    optim: OptimSpec = OptimSpec()
    wire: WireSpec = WireSpec()
    gossip: GossipSpec = GossipSpec()
    anchors: AnchorSpec = AnchorSpec()
    pipeline: PipelineSpec = PipelineSpec()
    snapshot: SnapshotSpec = SnapshotSpec()
    stop: StopSpec

    @property
    def batch_tokens(self) -> int:
        """Label tokens per inner step over all replicas of a stage."""
        return self.optim.inner_batch * self.data.seq_len

    @property
    def stop_tokens(self) -> int:
        """Globally committed label tokens at which the run ends."""
        limits = [self.stop.tokens, self.stop.steps and self.stop.steps * self.batch_tokens]
        return min(limit for limit in limits if limit is not None)

    @property
    def total_steps(self) -> int:
        """Inner steps of the whole run: what the learning-rate schedule spans."""
        return -(-self.stop_tokens // self.batch_tokens)


class Resolved(Table):
    """What the operator's peer measured or hashed before the run began."""

    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    vocabulary: int = Field(ge=1)
    cut: list[int] = Field(description="first layer of every stage but the first")
    tied: Literal["none", "ring", "freeze"]
    base_sha256: list[str] = Field(description="manifest hash of each stage's base weights")
    tokenizer_sha256: str = Field(description="manifest hash of config and tokenizer files")
    data_sha256: str = Field(description="manifest hash of the tokenized corpus")
    features_sha256: str = Field(description="manifest hash of the token features, for codecs")


class ResolvedRun(Table):
    """What every peer of a run holds, byte for byte. `run_id` names it."""

    spec: RunSpec
    resolved: Resolved
    operator: str = Field(description="peer id (base58 of the Ed25519 identity) of the operator")

    def canonical(self) -> bytes:
        """The bytes that are hashed and sent: JSON, sorted keys, no spaces."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()

    @property
    def run_id(self) -> str:
        """First 20 bytes of the SHA-256 of the canonical form, as 40 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()[:40]

    @property
    def stages(self) -> int:
        return len(self.resolved.cut) + 1
