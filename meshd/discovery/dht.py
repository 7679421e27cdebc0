"""The Registry over a Kademlia DHT: hivemind's DHTNode in this event loop, on a p2pd process that is supervised.

The node starts alone and then dials its bootstrap addresses one by one: so each that fails can be named, and none of
them can keep the node from starting. Records live under one key per stage (and one for peers without a stage), the
peer id as subkey; every node checks signature, key and end of a record before it stores or believes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshd.clock import Clock, SystemClock
from meshd.discovery.addresses import (
    PeerAddress,
    announced_hosts,
    by_peer,
    check_announce,
    presentable,
    readable,
)
from meshd.discovery.entrance import Doorway, Entrance, Timing
from meshd.discovery.p2pd import Endpoint, P2pd  # before hivemind: it sets what grpc reads at import
from meshd.discovery.records import MAX_AHEAD_S, RecordBook, content_problem, seal, withdrawn
from meshd.discovery.validator import RecordValidator, dht_key
from meshd.errors import NetworkError, ResourceError
from meshd.identity import Identity
from meshd.proto import meshd_pb2 as pb

from hivemind.dht.node import DHTNode  # isort: skip
from hivemind.dht.routing import DHTID  # isort: skip
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure  # isort: skip

log = logging.getLogger(__name__)

_UNKNOWN_STAGES = 16  # looked at while a joiner does not know its run: any peer can tell it
_MAX_FROM_RECORDS = 8  # peers dialled from old records and from memory when all else fails
_MAX_MET = 64  # peers whose addresses are kept past the end of their records
# A p2pd that ran for so long was sound: its loss is a new one, and it is started again at once.
_SOUND_S = 60.0


class DhtRegistry:
    """Registry of one run for one peer. Make it with `start`, keep `run` running, end it with `close`."""

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        endpoint: Endpoint,
        bootstrap: Sequence[PeerAddress],
        remembered: Sequence[PeerAddress],
        clock: Clock,
        rng: random.Random,
        timing: Timing,
    ) -> None:
        self._identity, self._run_id, self._endpoint = identity, run_id, endpoint
        self._clock, self._rng, self._timing = clock, rng, timing
        self._stages = 0
        self._validator = RecordValidator(run_id, clock)
        self._book = RecordBook()
        self._p2pd: P2pd | None = None
        self._node: DHTNode | None = None
        self._maddrs: tuple[PeerAddress, ...] = ()
        self._mine: pb.Record | None = None
        self._no_start = ""  # why p2pd does not start, at the last try
        self._entrance = Entrance(bootstrap, timing)
        self._met: dict[str, tuple[PeerAddress, ...]] = {**by_peer(remembered)}  # longest not seen first
        self._shown = {identity.peer_id}  # by the DHT, when it was last read
        self._refreshed = False
        self._up, self._joined = asyncio.Event(), asyncio.Event()
        self._wake, self._closing = asyncio.Event(), asyncio.Event()

    @classmethod
    async def start(
        cls,
        identity: Identity,
        run_id: str,
        *,
        endpoint: Endpoint,
        bootstrap: Sequence[PeerAddress] = (),
        remembered: Sequence[PeerAddress] = (),
        stages: int = 0,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        timing: Timing | None = None,
    ) -> DhtRegistry:
        """Start p2pd and the DHT node, and try each bootstrap address once.

        Unreachable bootstrap addresses are logged by name and tried again by `run`; meanwhile the node is alone
        (`joined`, `problem`). remembered: peers of an earlier time, dialled while no bootstrap address has answered.
        stages: of the run, 0 while unknown. Raises ConfigError when the swarm cannot dial the
        address that this peer would announce (C03), ResourceError when p2pd cannot start (C12: port, binary).
        """
        clock, timing = clock or SystemClock(), timing or Timing()
        check_announce(announced_hosts(endpoint.listen, endpoint.announce), bootstrap, endpoint.announce)
        self = cls(identity, run_id, endpoint, bootstrap, remembered, clock, rng or random.Random(), timing)
        self.set_stages(stages)
        await self._start_node()
        try:
            await self._dial_missing()
        except BaseException:
            await self.close()
            raise
        return self

    # ---- Registry -------------------------------------------------------------------------------------------------

    async def announce(self, record: pb.Record) -> None:
        """See Registry. The record must outlive the one announced before: DHT nodes keep what lives longer."""
        envelope = seal(record, self._identity)
        self._mine = pb.Record()
        self._mine.CopyFrom(record)
        await self._store(record, envelope)

    async def withdraw(self) -> None:
        if self._mine is None:
            return
        gone, self._mine = withdrawn(self._mine), None
        try:
            # Ctrl-C reaches p2pd too, so it may just be on its way up again.
            async with asyncio.timeout(self._timing.dial_s):
                await self._up.wait()
            await self._store(gone, seal(gone, self._identity))
        except (NetworkError, TimeoutError) as error:
            log.debug("record not taken back, it will expire: %s", str(error) or self.problem)

    async def refresh(self) -> Sequence[pb.Record]:
        """See Registry. While the DHT is down, the peers known before."""
        keys = [dht_key(self._run_id, stage) for stage in (-1, *range(self._stages or _UNKNOWN_STAGES))]
        try:
            node = self._running()
            async with asyncio.timeout(self._timing.call_s):
                found = await node.get_many(keys, sufficient_expiration_time=math.inf)
        except (NetworkError, TimeoutError) as error:
            log.debug("DHT not read: %s", str(error) or f"no result within {self._timing.call_s:.0f} s")
            return self.peers
        now = self._clock.time()
        self._shown = {self._identity.peer_id}
        for entry in found.values():
            if entry is not None and isinstance(entry.value, dict):
                for value, _ in entry.value.values():
                    self._take(value, now)
        self._refreshed = True
        self._meet(self.peers)
        self._entrance.forget(self._shown)
        return self.peers

    @property
    def peers(self) -> Sequence[pb.Record]:
        return self._book.live(self._clock.time(), without=self._identity.peer_id)

    def heard(self, record: pb.Record) -> None:
        """See Registry. It is not signed: what is believed of it is what its address already says for itself."""
        now = self._clock.time()
        if record.run_id != self._run_id or content_problem(record) or record.expires > now + MAX_AHEAD_S:
            return
        self._note(self._book.add(record, now))
        if record.peer_id not in self._shown:
            # It lives, and the DHT does not show it: perhaps there are two DHTs (C01).
            self.known_peer(record.maddrs)

    async def close(self) -> None:
        """End the node and its process. Bounded in time, idempotent; `run` returns."""
        self._closing.set()
        await self._stop_node()

    # ---- beyond Registry ------------------------------------------------------------------------------------------

    def set_stages(self, stages: int) -> None:
        """How many stages the run has, once known: the keys that `refresh` reads."""
        self._stages = stages

    @property
    def joined(self) -> bool:
        """Whether the routing table holds any other node."""
        return self._node is not None and bool(self._node.protocol.routing_table.uid_to_peer_id)

    async def wait_joined(self) -> None:
        """Wait until a bootstrap address or known peer has answered. Needs `run` to be running."""
        await self._joined.wait()

    @property
    def problem(self) -> str:
        """What is wrong, in one line for status and doctor; empty when nothing is."""
        if self._node is None:
            why = f" ({self._no_start})" if self._no_start else ""
            return f"the libp2p daemon is down, it is being started again{why}"
        return self._entrance.problem

    @property
    def p2pd_pid(self) -> int | None:
        return None if self._p2pd is None else self._p2pd.pid

    @property
    def port(self) -> int:
        """The libp2p port, kept over restarts of p2pd."""
        return self._endpoint.port

    def maddrs(self) -> tuple[PeerAddress, ...]:
        """Addresses of this peer for the swarm link and its record: the farthest-reaching first, at most 8."""
        return self._maddrs

    def known_peer(self, maddrs: Iterable[str]) -> None:
        """Tell of a peer of this run that is met otherwise (gRPC), by the libp2p addresses in its record.

        If the DHT view lacks it, it is dialled at once, so that two DHTs that do not know of each other merge (C01).
        """
        if self._entrance.tell(readable(maddrs), self._shown):
            self._wake.set()

    async def run(self) -> None:
        """Keep p2pd alive and the node joined, until `close` or cancellation."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._supervise()), group.create_task(self._keep_joined())]
            await self._closing.wait()
            for task in tasks:
                task.cancel()

    # ---- the node -------------------------------------------------------------------------------------------------

    async def _start_node(self) -> None:
        p2pd = await P2pd.start(self._identity, self._endpoint)
        try:
            async with asyncio.timeout(self._timing.call_s):
                node = await DHTNode.create(
                    p2p=p2pd.p2p,
                    node_id=DHTID.generate(source=self._identity.peer_id),
                    record_validator=self._validator,
                    wait_timeout=min(3.0, self._timing.dial_s),
                    # Snapshots are cached here; hivemind's caches would only serve old records.
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                    # A read that was given up would otherwise be waited for by the next one.
                    reuse_get_requests=False,
                )
            self._maddrs = presentable(await p2pd.visible())
        except TimeoutError as error:
            await p2pd.stop()
            raise ResourceError("the DHT node did not start: p2pd took no handlers") from error
        except (OSError, EOFError, ControlFailure) as error:  # p2pd died meanwhile
            await p2pd.stop()
            raise ResourceError(f"the DHT node did not start: {str(error) or 'p2pd died'}") from error
        except BaseException:
            await p2pd.stop()
            raise
        if self._closing.is_set():  # closed meanwhile: nobody would stop it any more
            await p2pd.stop()
            raise NetworkError("the registry is closed")
        self._endpoint = replace(self._endpoint, port=p2pd.port)
        self._p2pd, self._node, self._no_start = p2pd, node, ""
        self._up.set()

    async def _stop_node(self) -> None:
        # DHTNode.shutdown would wait for answers of p2pd that may never come; ending the process ends all it does.
        node, p2pd, self._node, self._p2pd = self._node, self._p2pd, None, None
        self._up.clear()
        if node is not None:
            node.is_alive = False
        if p2pd is not None:
            await p2pd.stop()

    def _running(self) -> DHTNode:
        if self._node is None:
            raise NetworkError(self.problem)
        return self._node

    async def _store(self, record: pb.Record, envelope: bytes) -> None:
        node, key = self._running(), dht_key(self._run_id, record.stage)
        self._book.add(record, self._clock.time())
        try:
            async with asyncio.timeout(self._timing.call_s):
                stored = await node.store(key, envelope, record.expires, subkey=record.peer_id)
        except TimeoutError as error:
            raise NetworkError(f"record not stored in the DHT within {self._timing.call_s:.0f} s") from error
        if not stored:
            raise NetworkError(
                "the DHT refused this peer's record: it holds one that lives longer, or clocks differ by seconds. "
                "Fix: check the clock of this machine (timedatectl), and that no second peer uses this identity"
            )

    def _take(self, value: object, now: float) -> None:
        record = self._validator.open(value, now)
        if isinstance(record, str):
            self._note(record)
            return
        self._shown.add(record.peer_id)
        self._note(self._book.add(record, now))

    def _note(self, reason: str | None) -> None:
        if reason:
            log.debug("record refused: %s", reason)

    def _meet(self, records: Iterable[pb.Record]) -> None:
        """Keep where peers are to be dialled: after an outage that outlasts all records, they are the way back."""
        for record in records:
            own = tuple(a for a in readable(record.maddrs) if a.peer_id == record.peer_id)
            if own:
                self._met.pop(record.peer_id, None)
                self._met[record.peer_id] = own
        while len(self._met) > _MAX_MET:
            del self._met[next(iter(self._met))]

    # ---- supervision ----------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        short_lives = 0
        while self._p2pd is not None and not self._closing.is_set():
            born = self._clock.monotonic()
            reason, since = await self._p2pd.wait_dead(), self._clock.monotonic()
            if self._closing.is_set():
                return
            await self._stop_node()
            short_lives = 0 if since - born >= _SOUND_S else short_lives + 1
            if short_lives > 1:
                delay = self._backoff(short_lives - 2)
                log.warning("libp2p daemon lost again (%s), started again in %.1f s", reason, delay)
                await self._clock.sleep(delay)
            await self._start_again(reason)
            if self._closing.is_set():
                return
            await self._dial_missing()
            took_s = self._clock.monotonic() - since
            if self._mine is not None and self._mine.expires > self._clock.time():
                with contextlib.suppress(
                    NetworkError
                ):  # others may still hold it; the next renewal comes soon
                    await self._store(self._mine, seal(self._mine, self._identity))
            log.warning(
                "libp2p daemon lost (%s), started again as process %s in %.1f s, %s",
                reason,
                self.p2pd_pid,
                took_s,
                "joined" if self.joined else f"alone so far: {self.problem or 'no other peer is known'}",
            )

    async def _start_again(self, lost: str) -> None:
        """Until it runs again, or the registry is closed. Each new reason why it does not is said once."""
        failures, told = 0, ""
        while not self._closing.is_set():
            try:
                await self._start_node()
                return
            except (ResourceError, NetworkError) as error:
                self._no_start = str(error)
            if self._no_start != told and not self._closing.is_set():
                told = self._no_start
                log.warning("libp2p daemon lost (%s), does not start: %s. Trying on", lost, told)
            await self._clock.sleep(self._backoff(failures))
            failures += 1

    async def _keep_joined(self) -> None:
        failures = 0
        while True:
            alone = self._entrance.searching and not self.joined
            failures = failures + 1 if alone else 0
            delay = (
                self._backoff(failures - 1) if alone else self._timing.remix_s * self._rng.uniform(0.5, 1.5)
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()
            if self._wake.is_set():
                self._wake.clear()
                await self.refresh()  # forgets those that were only new to us
            if self._node is not None:
                await self._dial_missing()

    def _backoff(self, failures: int) -> float:
        ceiling = min(self._timing.retry_max_s, self._timing.retry_s * 2.0 ** min(failures, 16))
        return ceiling * self._rng.uniform(0.5, 1.0)

    async def _dial_missing(self) -> None:
        if self._p2pd is None or self._node is None:
            return
        fallback: list[PeerAddress] = []
        if not self.joined:
            chosen = self._rng.sample(sorted(self._met), min(len(self._met), _MAX_FROM_RECORDS))
            fallback = [address for peer_id in chosen for address in self._met[peer_id]]
        told = await self._entrance.dial_missing(Doorway(self._p2pd, self._node, self._maddrs), fallback)
        if self.joined:
            self._joined.set()
        if told and self._refreshed:
            log.warning("the DHT had split: %s known but not in view. Joined with it", ", ".join(told))
