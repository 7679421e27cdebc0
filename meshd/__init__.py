"""meshd adapts language models over the internet, on GPUs that volunteers own."""

__version__ = "0.1.0"

# Version of the wire protocol (proto/meshd/v1). Peers of different versions refuse each other at the handshake.
PROTOCOL_VERSION = 4
