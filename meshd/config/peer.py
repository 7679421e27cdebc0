"""The peer config: what one daemon needs to know about its own machine, as TOML or command-line options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from meshd.config.runspec import Table

Role = Literal["stage", "seed", "anchor"]

# A slower link could not even say that it is there.
MIN_RATE_BPS = 10_000


class LinkTable(Table):
    """This peer's uplink made slower than it is: all that it sends over gRPC (docs/lab.md)."""

    delay_ms: float = Field(
        0.0, ge=0.0, le=1000.0, description="one-way delay of what this peer sends, in ms; 0: none"
    )
    jitter_ms: float = Field(
        0.0, ge=0.0, le=1000.0, description="up to so many ms more, by chance; order is kept within a stream"
    )
    rate_bps: int = Field(
        0,
        ge=0,
        description=f"bits/s that all connections together send, {MIN_RATE_BPS:_} or more; 0: no limit",
    )

    @field_validator("rate_bps")
    @classmethod
    def _enough(cls, rate_bps: int) -> int:
        if 0 < rate_bps < MIN_RATE_BPS:
            raise ValueError(
                f"give bits/s (20_000_000 is 20 Mbit/s), {MIN_RATE_BPS} or more, or 0 for no limit"
            )
        return rate_bps


class PeerConfig(Table):
    """One daemon on one machine."""

    state_dir: Path = Field(
        Path("~/.local/state/meshd"), description="identity, snapshots, caches of this peer"
    )
    role: Role = Field(
        "stage",
        description="`stage` computes; `anchor` measures a copy of the whole model on clean passes; `seed` bootstraps "
        "others and keeps checkpoints",
    )
    stage: int | None = Field(
        None, ge=0, description="stage to hold; left out: chosen from the swarm's state"
    )
    name: str = Field("", max_length=64, description="for people; left out: host name")
    listen: str = Field("127.0.0.1", description="address that gRPC and the DHT listen on")
    announce: str | None = Field(None, description="address that others dial; left out: `listen`")
    port: int = Field(0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    dht_port: int = Field(0, ge=0, le=65535, description="libp2p port; 0 takes a free one")
    http_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] = Field(
        0, description="port of `/healthz` over HTTP; 0 takes a free one, `off` serves none"
    )
    http_listen: str = Field("127.0.0.1", description="address that `/healthz` listens on")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="`auto`, `cpu`, `cuda` or `cuda:N`"
    )
    offload: bool = Field(
        False,
        description="of an anchor: stages are kept on the CPU and visit the device one at a time, where the whole "
        "model does not fit",
    )
    threads: int = Field(
        0, ge=0, le=1024, description="torch threads; 0: all cores of this process's affinity"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe event that is logged"
    )
    log_format: Literal["console", "json"] = Field(
        "console", description="`json`: one object a line, for machines"
    )
    trace: str = Field(
        "",
        description="file that a timeline of what this peer does is written to, 64 MiB at most (docs/trace.md); empty: "
        "none",
    )
    drain_s: float = Field(
        20.0, ge=0.0, description="on shutdown, seconds to finish or hand back microbatches"
    )
    link: LinkTable = LinkTable()
