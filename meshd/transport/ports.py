"""Ports of this machine. Imports nothing heavy: what is in use is said before anything is loaded."""

from __future__ import annotations

import socket

from meshd.errors import ResourceError


def bindable_port(listen: str, port: int, field: str) -> int:
    """`port`, or a free one for 0. Raises ResourceError, naming the config's `field`, when it cannot be listened on."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen, port))
        except OSError as error:
            raise ResourceError(
                f"cannot listen on {listen} port {port} ({field}): {error.strerror}. "
                f"Fix: {field} = another port, or 0 for a free one; listen = an address of this machine"
            ) from error
        return int(probe.getsockname()[1])
