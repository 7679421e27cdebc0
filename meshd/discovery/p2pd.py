"""One libp2p daemon process (p2pd), started, watched and ended for certain.

hivemind's P2P does not notice when its process dies, and waits for ever for it in some calls (DESIGN section 10). Here
a second connection to the daemon's control socket stays open: its end is the death of the process, at once; a daemon
that hangs is found by asking it who it is. Every wait has a bound, and what does not end is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

# Before the first import of grpc anywhere: its fork handlers hang the parent when calls are in flight.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from meshd.discovery.addresses import PeerAddress, readable, socket_maddr
from meshd.discovery.leftovers import end_leftovers
from meshd.discovery.p2pd_process import P2pdDied, P2pdProcess
from meshd.errors import NetworkError, ResourceError
from meshd.identity import Identity
from meshd.transport.ports import bindable_port

log = logging.getLogger(__name__)

_START_S = 20.0
_CONTROL_S = 5.0  # for the daemon's own answers, no network behind them
_STOP_S = 3.0
_PULSE_S = 5.0  # between questions to a daemon that may hang
DIAL_BACKOFF = "dial backoff"  # libp2p does not dial an address again for 5 s and more after it failed
_DIAL_REASONS = ("connection refused", "no route to host", "i/o timeout", "no such host", "peer id mismatch")
_STARTS = 5  # tries with another free port when somebody took the first


class _ToOurDebug(logging.Handler):
    """hivemind and p2pd talk much, also about what is normal in a swarm; whoever wants it sets our level to debug."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("%s: %s", record.name, record.getMessage())


def quiet_hivemind() -> None:
    """Send hivemind's log, and p2pd's behind it, to this module's logger at debug level. Idempotent."""
    use_hivemind_log_handler("nowhere")
    theirs = logging.getLogger("hivemind")
    theirs.propagate = False
    theirs.setLevel(logging.INFO)
    if not any(isinstance(handler, _ToOurDebug) for handler in theirs.handlers):
        theirs.addHandler(_ToOurDebug())


@dataclass(frozen=True)
class Endpoint:
    """Where p2pd listens, and what it tells others. port 0: `preferred` if it is free (0: none is), else any."""

    listen: str
    port: int = 0
    announce: str | None = None
    preferred: int = 0


class P2pd:
    """A running p2pd. `p2p` is hivemind's handle to it, for DHTNode."""

    def __init__(self, p2p: P2P, port: int, process: P2pdProcess) -> None:
        self.p2p = p2p
        self.port = port
        self._process = process
        self._control = ControlClient(DaemonConnector(p2p.daemon_listen_maddr), _initialized_with_create=True)

    @classmethod
    async def start(cls, identity: Identity, endpoint: Endpoint) -> P2pd:
        """Start the process and wait until it answers. Connects to nobody. Ends one that a killed daemon left.

        Raises ResourceError that says what failed: the port, the binary, or what p2pd itself said (C12).
        """
        quiet_hivemind()
        for pid in await asyncio.to_thread(end_leftovers, identity.path):
            log.info("ended p2pd process %s, left by a daemon that was killed", pid)
        for attempt in range(1, _STARTS + 1):
            port = _choose_port(endpoint)
            try:
                return await cls._start_once(identity, endpoint, port)
            except ResourceError as error:
                if endpoint.port or attempt == _STARTS or "in use" not in str(error):
                    raise
        raise AssertionError("unreachable")

    @classmethod
    async def _start_once(cls, identity: Identity, endpoint: Endpoint, port: int) -> P2pd:
        announce = None if endpoint.announce is None else socket_maddr(endpoint.announce, port)
        try:
            process = await P2pdProcess.start(identity.path, socket_maddr(endpoint.listen, port), announce)
        except OSError as error:
            raise ResourceError(
                f"the p2pd binary (libp2p daemon, part of hivemind) cannot be run: {error}"
            ) from error
        started = False
        try:
            async with asyncio.timeout(_START_S):
                await process.ready()
                p2p = await P2P.replicate(Multiaddr(f"/unix{process.control}"))
            started = True
            return cls(p2p, port, process)
        except TimeoutError as error:
            raise ResourceError(
                f"p2pd (libp2p daemon) did not answer within {_START_S:.0f} s of its start"
            ) from error
        except (P2pdDied, ControlFailure, OSError, EOFError) as error:
            raise ResourceError(_why_no_start(error, endpoint, port)) from error
        finally:
            if not started:
                await process.stop(_STOP_S)

    @property
    def peer_id(self) -> str:
        return str(self.p2p.peer_id)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def visible(self) -> list[PeerAddress]:
        """Addresses that others may dial, as p2pd knows them now."""
        async with _control_errors("who are you"):
            await self.p2p.get_visible_maddrs(latest=True)
            maddrs = await self.p2p.get_visible_maddrs()
        return readable(map(str, maddrs))

    async def connect(self, peer_id: str, addresses: Sequence[PeerAddress], timeout_s: float) -> None:
        """Open a libp2p connection to a peer. Raises NetworkError that says why it failed."""
        maddrs = [Multiaddr(str(address).rpartition("/p2p/")[0]) for address in addresses]
        try:
            async with asyncio.timeout(timeout_s):
                await self._control.connect(PeerID.from_base58(peer_id), maddrs)
        except TimeoutError as error:
            raise NetworkError(f"no connection within {timeout_s:.0f} s") from error
        except ControlFailure as error:
            raise NetworkError(_dial_reason(str(error))) from error
        except (OSError, EOFError) as error:
            raise NetworkError(f"p2pd does not answer ({error})") from error

    async def wait_dead(self) -> str:
        """Return, with the reason, once the process has died or hangs."""
        path = self.p2p.daemon_listen_maddr["unix"]
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            return f"its control socket is gone ({error.strerror})"
        try:
            while True:
                try:
                    async with asyncio.timeout(_PULSE_S):
                        if not await reader.read(1):
                            return f"process {self.pid} has died"
                except TimeoutError:
                    async with _control_errors("pulse"):
                        await self._control.identify()
        except ConnectionError:
            return f"process {self.pid} has died"
        except (OSError, NetworkError) as error:
            return f"process {self.pid} does not answer ({error})"
        finally:
            writer.close()

    async def stop(self) -> None:
        """End the process, by force if need be, and remove its sockets. Never hangs, never raises for a dead one."""
        await self.p2p.shutdown()  # of the connection: the process is not hivemind's child
        await self._process.stop(_STOP_S)


@contextlib.asynccontextmanager
async def _control_errors(question: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_CONTROL_S):
            yield
    except TimeoutError as error:
        raise NetworkError(f"p2pd gave no answer to {question!r} within {_CONTROL_S:.0f} s") from error
    except (OSError, EOFError, ControlFailure, ValueError) as error:
        raise NetworkError(f"p2pd: {str(error) or type(error).__name__}") from error


def _choose_port(endpoint: Endpoint) -> int:
    if endpoint.port == 0 and endpoint.preferred:
        with contextlib.suppress(ResourceError):
            return bindable_port(endpoint.listen, endpoint.preferred, "dht_port")
    return bindable_port(endpoint.listen, endpoint.port, "dht_port")


def _why_no_start(error: Exception, endpoint: Endpoint, port: int) -> str:
    text = str(error) or type(error).__name__
    if "address already in use" in text:
        return f"cannot listen on {endpoint.listen} port {port} (libp2p): address already in use. Fix: another dht_port"
    return f"p2pd (libp2p daemon) did not start: {text}"


def _dial_reason(text: str) -> str:
    """The innermost cause of p2pd's multi-line dial error."""
    last = text.strip().splitlines()[-1].strip()
    for known in (*_DIAL_REASONS, DIAL_BACKOFF):
        if known in text:
            return known
    return last.removeprefix("Connect failed. msg=")[:200]
