"""Channel and server options of gRPC, with what was measured about them (DESIGN section 10)."""

from __future__ import annotations

from meshd.transport.limits import MAX_MESSAGE_BYTES

Options = list[tuple[str, int]]

CONNECT_TIMEOUT_S = 5.0

# A stream of state without a chunk for so long is given up. There is no limit on the whole (C05).
PROGRESS_TIMEOUT_S = 30.0

PING_MS = 2000

_COMMON: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A frozen peer is noticed within about 5 s. keepalive alone took 62 s: the ping has a time-out of its own.
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", PING_MS),
    ("grpc.http2.ping_timeout_ms", PING_MS),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
]


def client_options() -> Options:
    """Options of a channel."""
    return [
        *_COMMON,
        # Peers are dialled directly; a proxy of the environment is for web traffic.
        ("grpc.enable_http_proxy", 0),
        # A call fails once and says so: who to try next is the router's decision.
        ("grpc.enable_retries", 0),
        # Transports in one process do not share connections, so that one that breaks is one peer's matter.
        ("grpc.use_local_subchannel_pool", 1),
        # A channel without calls drops its connection; the next call makes it anew.
        ("grpc.client_idle_timeout_ms", 60_000),
    ]


def server_options() -> Options:
    """Options of a server."""
    return [
        *_COMMON,
        # Clients ping every 2 s; by default a server answers more than one in 5 minutes with GOAWAY.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_MS // 2),
        # On a busy machine pings bunch up; the server would call that abuse ("Too many pings") and drop every stream.
        ("grpc.http2.max_ping_strikes", 0),
        # Else a second daemon could bind the same port and share its connections.
        ("grpc.so_reuseport", 0),
    ]
