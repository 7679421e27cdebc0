"""How errors cross between peers: a status code and one line of text, the same in memory and over gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshd.errors import MeshdError, MismatchError, NetworkError, ResourceError
from meshd.transport.base import LinkLost, NotHere

# Names of gRPC status codes. INTERNAL stands for every failure of the peer that is not a refusal.
Code = Literal["FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "NOT_FOUND", "UNAVAILABLE", "INTERNAL"]

# Longest text that crosses, bytes: gRPC carries it in a header of at most 8 KiB, three characters a byte at worst.
MAX_TEXT_BYTES = 2000


@dataclass(frozen=True)
class Status:
    """A refusal or failure, as it crosses."""

    code: Code
    text: str

    @classmethod
    def of(cls, error: MeshdError) -> Status:
        """What a handler's error becomes on the wire. Subclasses first: NotHere is a NetworkError."""
        text = " ".join(str(error).split()).encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
        match error:
            case NotHere():
                return cls("NOT_FOUND", text)
            case MismatchError():
                return cls("FAILED_PRECONDITION", text)
            case ResourceError():
                return cls("RESOURCE_EXHAUSTED", text)
            case NetworkError():
                return cls("UNAVAILABLE", text)
            case _:
                return cls("INTERNAL", text)

    def error(self, remote: str) -> MeshdError:
        """What the dialling side raises for it; `remote` is the address of the peer that answered."""
        match self.code:
            case "NOT_FOUND":
                return NotHere(f"{remote}: {self.text}")
            case "FAILED_PRECONDITION":
                return MismatchError(f"{remote} refused: {self.text}")
            case "RESOURCE_EXHAUSTED":
                return ResourceError(f"{remote} is out of room: {self.text}")
            case "UNAVAILABLE":
                return LinkLost(f"lost {remote}: {self.text}")
            case "INTERNAL":
                return LinkLost(f"{remote} failed: {self.text}")
