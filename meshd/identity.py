"""Who a peer is: one Ed25519 key, in the file format that libp2p's daemon reads, and the peer id that follows from it.

Format of the file: libp2p's PrivateKey protobuf, `{1: KeyType.Ed25519 = 1, 2: 64 bytes, seed then public key}`. The
peer id is base58 of the identity multihash of the PublicKey protobuf (libp2p specs, peer-ids).
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from meshd.errors import ResourceError

log = logging.getLogger(__name__)

_PRIVATE_PREFIX = b"\x08\x01\x12\x40"  # field 1 (varint) = Ed25519, field 2 of 64 bytes
_PUBLIC_PREFIX = b"\x08\x01\x12\x20"  # field 1 (varint) = Ed25519, field 2 of 32 bytes
_IDENTITY_MULTIHASH = b"\x00\x24"  # hash function "identity", 36 bytes
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class Identity:
    """This peer's key. Lives in `path`, readable by its owner only."""

    def __init__(self, key: Ed25519PrivateKey, path: Path) -> None:
        self._key = key
        self.path = path
        self.public_key: bytes = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id: str = peer_id_of(self.public_key)

    @classmethod
    def load_or_create(cls, path: Path) -> tuple[Identity, bool]:
        """The identity in `path`; made, with its folder, when there is none. The flag says whether it was made.

        Warns when a new identity is made in a folder that already holds other state: then a file was probably lost,
        and other peers will not know this one again. Raises ResourceError when the file cannot be read or written,
        or is no identity (it is never overwritten).
        """
        try:
            return cls._read(path), False
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ResourceError(_denied("read", path, error)) from error
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The daemon's own lock is there before everything else.
            others = sorted(entry.name for entry in path.parent.iterdir() if entry.name != "lock")
            key = Ed25519PrivateKey.generate()
            created = _write_new(path, _PRIVATE_PREFIX + _seed(key) + _public(key))
            identity = cls(key, path) if created else cls._read(path)
        except OSError as error:
            raise ResourceError(_denied("write", path, error)) from error
        if created and others:
            log.warning(
                "new identity %s made in %s beside existing state (%s): if the old identity file was lost, put it "
                "back, or other peers will take this one for a stranger",
                identity.peer_id,
                path,
                ", ".join(others[:5]),
            )
        return identity, created

    @classmethod
    def _read(cls, path: Path) -> Identity:
        data = path.read_bytes()
        seed, public = data[4:36], data[36:]
        if len(data) == 68 and data.startswith(_PRIVATE_PREFIX):
            key = Ed25519PrivateKey.from_private_bytes(seed)
            if _public(key) == public:
                return cls(key, path)
        raise ResourceError(
            f"{path} is not a meshd identity (an Ed25519 key of 68 bytes in libp2p's format; this is {len(data)} "
            f"bytes of something else). Fix: name another file, or move this one away to get a new identity"
        )

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature over `data`, 64 bytes."""
        return self._key.sign(data)


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` was made with the key of `public_key` (raw, 32 bytes)."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id (`12D3KooW...`) of a raw Ed25519 public key. Raises ValueError unless it has 32 bytes."""
    if len(public_key) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return _base58(_IDENTITY_MULTIHASH + _PUBLIC_PREFIX + public_key)


def public_key_of(peer_id: str) -> bytes:
    """The raw public key (32 bytes) that an Ed25519 peer id holds. Raises ValueError when it is not one."""
    number = 0
    for letter in peer_id[:64]:
        digit = _ALPHABET.find(letter)
        if digit < 0:
            raise ValueError(f"{letter!r} does not occur in a peer id")
        number = number * 58 + digit
    prefix = _IDENTITY_MULTIHASH + _PUBLIC_PREFIX
    size = len(prefix) + 32
    data = number.to_bytes(64, "big")[-size:]
    if not data.startswith(prefix) or peer_id != _base58(data):
        raise ValueError("not the peer id of an Ed25519 key (12D3KooW and 44 more characters)")
    return data[len(prefix) :]


def _base58(data: bytes) -> str:
    zeros = len(data) - len(data.lstrip(b"\0"))
    number, letters = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        letters = _ALPHABET[digit] + letters
    return "1" * zeros + letters


def _seed(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def _public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def _write_new(path: Path, data: bytes) -> bool:
    """Write the whole file or nothing, mode 0600. False when another process made it first."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mkstemp gives mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike rename, refuses to replace a file that came in between
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def _denied(verb: str, path: Path, error: OSError) -> str:
    return (
        f"cannot {verb} the identity file {path}: {error.strerror or error}. "
        f"Fix: give this user access to {path.parent}, or choose another state_dir"
    )
