"""The Registry in a file: a small private swarm without a DHT, its peers listed by the operator.

    [[peer]]
    id = "12D3KooW..."           # named by `meshd` at its start
    address = "10.0.0.2:31331"   # host:port of its gRPC server: what it was given as --announce and --port
    stage = 0                    # left out: where the swarm needs it most
    role = "stage"               # or "seed", or "anchor"; left out: stage
    name = "attic"               # left out: none

    run_id = "..."               # above the peers; left out: whatever run the link names

The operator starts with `meshd run RUN.toml --role seed --registry FILE`, the others with a copy of the file and
`meshd join meshd:RUNID@file:FILE`, the link that the seed logs. A peer that is not listed yet says so, with its id.

Peers read the file again when it changes. They never write it: `announce` checks that the file says of this peer what
it says of itself, since all others go by the file. (To take a peer out, stop it too: one that works on without its
entry only warns.) The file gives addresses only; what the peers are and do they say themselves, asked by `hello` at
every refresh.
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from meshd.clock import Clock
from meshd.discovery.records import content_problem, hello_of, is_withdrawn
from meshd.errors import ConfigError, MeshdError, ResourceError
from meshd.identity import public_key_of
from meshd.observe.log import event
from meshd.proto import meshd_pb2 as pb
from meshd.transport.base import Transport

log = logging.getLogger(__name__)

# Of what a peer said: it outlives some lost questions, as a record in the DHT does.
_LIFE_S = 15.0
# A peer that hangs must not hold up a refresh, which the daemon makes every few seconds.
_ANSWER_S = 3.0
_Stamp = tuple[int, int, int]
_ROLES = {"stage": pb.ROLE_STAGE, "seed": pb.ROLE_SEED, "anchor": pb.ROLE_ANCHOR}


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str
    address: str = Field(pattern=r"^\S+:\d{1,5}$", max_length=256)
    stage: int = Field(-1, ge=-1)
    role: Literal["stage", "seed", "anchor"] = "stage"
    name: str = Field("", max_length=64)

    @field_validator("id")
    @classmethod
    def _is_peer_id(cls, value: str) -> str:
        public_key_of(value)
        return value

    def record(self, run_id: str, expires: float) -> pb.Record:
        """Of the peer as listed: without state and protocol, which only the peer itself can tell."""
        return pb.Record(
            run_id=run_id,
            peer_id=self.id,
            name=self.name,
            role=_ROLES[self.role],
            stage=self.stage,
            address=self.address,
            expires=expires,
        )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run_id: str | None = Field(None, pattern=r"^[0-9a-f]{40}$")
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

    def __init__(self, path: Path, run_id: str, me: str, transport: Transport, clock: Clock) -> None:
        self._path, self._run_id, self._me = path, run_id, me
        self._transport, self._clock = transport, clock
        self._entries: dict[str, _Entry] = {}
        self._stamp: _Stamp | None = None
        self._complaint = ""
        self._agreed: tuple[str, int, int] | None = (
            None  # address, stage and role that the file last confirmed
        )
        self._disowned = ""  # why it does not any more, as last logged
        self._mine = pb.Record(peer_id=me, run_id=run_id)
        self._heard: dict[str, pb.Record] = {}
        self._silent: dict[str, str] = {}  # peer id: why, as last logged
        self._looking = asyncio.Lock()
        self._looks = 0

    @classmethod
    async def start(
        cls, path: Path, run_id: str, me: str, transport: Transport, clock: Clock
    ) -> StaticRegistry:
        """Read the file. Raises ConfigError when it is not right or of another run, ResourceError when not readable."""
        self = cls(path, run_id, me, transport, clock)
        await self._read_if_changed()
        return self

    async def announce(self, record: pb.Record) -> None:
        """Writes nothing. Raises ConfigError when the file does not say of this peer what `record` says.

        Once it did, an edit of the file does not end the peer: others may still know it, and the next edit may set it
        right. Each thing that is wrong is one warning.
        """
        mine = (record.address, record.stage, record.role)
        try:
            self._check(record)
            self._agreed, self._disowned = mine, ""
        except ConfigError as error:
            if mine != self._agreed:
                raise
            if str(error) != self._disowned:
                self._disowned = str(error)
                event(log, "no_longer_listed", level=logging.WARNING, reason=str(error))
        self._mine.CopyFrom(record)

    def _check(self, record: pb.Record) -> None:
        """Raises ConfigError when the file does not say of this peer what `record` says."""
        entry = self._entries.get(self._me)
        if entry is None:
            raise ConfigError(
                f"{self._path}: peer",
                self._me,
                "this peer is not listed",
                f'add [[peer]] with id = "{self._me}"',
            )
        listed = entry.record(self._run_id, 0.0)
        # The file leaves the stage to the peer, or the peer holds none yet.
        open_stage = -1 in (listed.stage, record.stage)
        pairs = {
            "address": (listed.address, record.address),
            "stage": (listed.stage, listed.stage if open_stage else record.stage),
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
        """Look at the file and ask all listed peers: takes 3 s at most, and the time to read.

        If a change made the file unusable, the peers of the last good one stay, with one warning.
        """
        before = self._looks
        async with self._looking:
            # A look that was under way when this one was asked for serves both.
            if self._looks == before:
                await self._read_or_complain()
                await asyncio.gather(*(self._ask(entry) for entry in self._others()))
                self._looks += 1
        return self.peers

    @property
    def peers(self) -> Sequence[pb.Record]:
        """All listed peers but this one, those who answered first; the others are without state and protocol."""
        now = self._clock.time()
        found = []
        for entry in self._others():
            heard = self._heard.get(entry.id)
            live = heard is not None and heard.expires > now
            found.append(heard if heard is not None and live else entry.record(self._run_id, now + _LIFE_S))
        return sorted(found, key=is_withdrawn)

    def heard(self, record: pb.Record) -> None:
        """Nothing: every refresh asks all peers themselves."""

    @property
    def problem(self) -> str:
        """Why the file as it is now is not gone by; empty: it is."""
        return self._complaint or self._disowned

    @property
    def listed_stage(self) -> int | None:
        """The stage that the file gives this peer; None: it chooses."""
        entry = self._entries.get(self._me)
        return entry.stage if entry is not None and entry.stage >= 0 else None

    async def close(self) -> None:
        """Nothing is held open."""

    def _others(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.id != self._me]

    async def _ask(self, entry: _Entry) -> None:
        """Take over what a listed peer says of itself; one log line for each new reason why it does not."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                reply = await self._transport.hello(entry.address, self._hello(entry))
            problem = self._problem(entry, reply.record)
        except (MeshdError, TimeoutError) as error:
            problem = str(error) or f"no answer within {_ANSWER_S:g} s"
        if problem is None:
            reply.record.address = entry.address
            reply.record.expires = self._clock.time() + _LIFE_S
            self._heard[entry.id] = reply.record
            self._silent.pop(entry.id, None)
        elif self._silent.get(entry.id) != problem:
            self._silent[entry.id] = problem
            event(
                log,
                "listed_peer_silent",
                peer=entry.name or entry.id[-8:],
                address=entry.address,
                reason=problem,
            )

    def _hello(self, entry: _Entry) -> pb.HelloRequest:
        met = entry.id in self._heard and entry.id not in self._silent
        return hello_of(self._mine, 0.0 if met else self._clock.time())

    def _problem(self, entry: _Entry, record: pb.Record) -> str | None:
        """Why an answer is not that of the listed peer in this run, or None."""
        if record.peer_id != entry.id:
            return f"peer {record.peer_id[:64]!r} answers there, not {entry.id}"
        if record.run_id != self._run_id:
            return f"it is of run {record.run_id[:40]!r}"
        return content_problem(record)

    async def _read_or_complain(self) -> None:
        try:
            await self._read_if_changed()
            self._complaint = ""
        except (ConfigError, ResourceError) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                log.warning("registry file not taken over, its last good state stays: %s", error)

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
        if file.run_id not in (None, self._run_id):
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
