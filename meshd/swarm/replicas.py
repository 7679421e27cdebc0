"""How many peers each stage of a local swarm has, as command lines say it."""

from __future__ import annotations

from meshd.errors import ConfigError


def replicas_of(text: str | None, stages: int) -> tuple[int, ...]:
    """`1,2,1` as one count per stage; None: one each. Raises ConfigError."""
    if text is None:
        return (1,) * stages
    example = ",".join(["1", "2", "1"][:stages] if stages <= 3 else ["1"] * stages)
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise ConfigError(
            "--replicas", text, "not a list of counts of 1 or more", f"write --replicas {example}"
        )
    if len(parts) != stages:
        fix = f"write one count per stage, such as --replicas {example}"
        raise ConfigError("--replicas", text, f"{len(parts)} counts for {stages} stages", fix)
    return tuple(int(part) for part in parts)
