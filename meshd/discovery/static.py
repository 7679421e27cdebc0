"""The Registry in a file: a small private swarm without a DHT, its peers listed by the operator.

    run_id = "0123456789abcdef0123456789abcdef01234567"

    [[peer]]
    id = "12D3KooW..."           # printed by `meshd` at its start
    address = "10.0.0.2:31331"   # host:port of its gRPC server
    stage = 0                    # left out: holds none
    role = "stage"               # or "seed"; left out: stage
    name = "attic"               # left out: none

Peers read the file again when it changes. They never write it: `announce` only checks that the file says of this peer
what it says of itself, since all others go by the file. Whether a listed peer is up shows at the handshake.
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from meshd import PROTOCOL_VERSION
from meshd.clock import Clock
from meshd.errors import ConfigError, ResourceError
from meshd.identity import public_key_of
from meshd.proto import meshd_pb2 as pb

log = logging.getLogger(__name__)

_LIFE_S = 120.0  # of a record made from the file, from the last look at it
_Stamp = tuple[int, int, int]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    address: str = Field(pattern=r"^\S+:\d{1,5}$", max_length=256)
    stage: int = Field(-1, ge=-1)
    role: Literal["stage", "seed"] = "stage"
    name: str = Field("", max_length=64)

    @field_validator("id")
    @classmethod
    def _is_peer_id(cls, value: str) -> str:
        public_key_of(value)
        return value

    def record(self, run_id: str, expires: float) -> pb.Record:
        return pb.Record(
            run_id=run_id,
            peer_id=self.id,
            name=self.name,
            role=pb.ROLE_STAGE if self.role == "stage" else pb.ROLE_SEED,
            stage=self.stage,
            state=pb.PEER_STATE_WORKING,
            address=self.address,
            protocol=PROTOCOL_VERSION,  # what it really speaks shows at the handshake
            expires=expires,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run_id: str = Field(pattern=r"^[0-9a-f]{40}$")
    peer: list[_Entry] = Field(min_length=1, max_length=1000)

    @field_validator("peer")
    @classmethod
    def _ids_differ(cls, value: list[_Entry]) -> list[_Entry]:
        ids = [entry.id for entry in value]
        if twice := next((peer_id for peer_id in ids if ids.count(peer_id) > 1), None):
            raise ValueError(f"{twice} is listed twice")
        return value


class StaticRegistry:
    """Registry of run `run_id` from the TOML file `path`, for peer `me`. Make it with `start`."""

    def __init__(self, path: Path, run_id: str, me: str, clock: Clock) -> None:
        self._path, self._run_id, self._me, self._clock = path, run_id, me, clock
        self._entries: dict[str, _Entry] = {}
        self._stamp: _Stamp | None = None
        self._expires = 0.0
        self._complaint = ""

    @classmethod
    async def start(cls, path: Path, run_id: str, me: str, clock: Clock) -> StaticRegistry:
        """Read the file. Raises ConfigError when it is not right or of another run, ResourceError when not readable."""
        self = cls(path, run_id, me, clock)
        await self._read_if_changed()
        return self

    async def announce(self, record: pb.Record) -> None:
        """Writes nothing. Raises ConfigError when the file does not say of this peer what `record` says."""
        entry = self._entries.get(self._me)
        if entry is None:
            raise ConfigError(
                f"{self._path}: peer",
                self._me,
                "this peer is not listed",
                f'add [[peer]] with id = "{self._me}"',
            )
        listed = entry.record(self._run_id, 0.0)
        pairs = {
            "address": (listed.address, record.address),
            "stage": (listed.stage, record.stage),
            "role": (pb.Role.Name(listed.role), pb.Role.Name(record.role)),
        }
        for field, (there, here) in pairs.items():
            if there != here:
                raise ConfigError(
                    f"{self._path}: peer.{field}",
                    there,
                    f"peer {self._me} runs with {here!r}, and others go by the file",
                    f"make the file and this peer's config agree on {field}",
                )

    async def withdraw(self) -> None:
        """Nothing to take back: the operator removes the entry."""

    async def refresh(self) -> Sequence[pb.Record]:
        """Look at the file. If a change made it unusable, the peers of the last good one stay, with one warning."""
        try:
            await self._read_if_changed()
            self._complaint = ""
        except (ConfigError, ResourceError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("registry file not taken over, its last good state stays: %s", error)
        self._expires = self._clock.time() + _LIFE_S
        return self.peers

    @property
    def peers(self) -> Sequence[pb.Record]:
        if self._expires <= self._clock.time():
            return ()
        others = (entry for entry in self._entries.values() if entry.id != self._me)
        return tuple(entry.record(self._run_id, self._expires) for entry in others)

    async def close(self) -> None:
        """Nothing is held open."""

    async def _read_if_changed(self) -> None:
        try:
            stamp, text = await asyncio.to_thread(_read, self._path, self._stamp)
        except OSError as error:
            raise ResourceError(f"cannot read the registry file {self._path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError("file", str(self._path), "it is not UTF-8 text", "save it as UTF-8") from error
        if text is None:
            return
        file = _parse(self._path, text)
        if file.run_id != self._run_id:
            raise ConfigError(
                f"{self._path}: run_id",
                file.run_id,
                f"this peer joins run {self._run_id}",
                "use the registry file of that run",
            )
        self._stamp, self._entries = stamp, {entry.id: entry for entry in file.peer}


def _read(path: Path, known: _Stamp | None) -> tuple[_Stamp, str | None]:
    """The file's stamp, and its text unless the stamp is the `known` one."""
    stat = path.stat()
    stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return stamp, None if stamp == known else path.read_text(encoding="utf-8")


def _parse(path: Path, text: str) -> _File:
    try:
        return _File.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("file", str(path), f"not TOML: {error}", "correct that place") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        value = "(not given)" if first["type"] == "missing" else first["input"]
        raise ConfigError(
            f"{path}: {where}", value, first["msg"], "see the example in docs or meshd.discovery.static"
        ) from error
