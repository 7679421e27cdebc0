"""The swarm link: the one string that a volunteer pastes to join a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from meshd.discovery.addresses import EXAMPLE, PeerAddress
from meshd.errors import ConfigError

_RUN_ID = re.compile(r"[0-9a-f]{40}")
_EXAMPLE = f"meshd:{'0123456789abcdef' * 2}01234567@{EXAMPLE}"


@dataclass(frozen=True)
class SwarmLink:
    """`meshd:RUNID@ADDRESS[,ADDRESS...]`, or `meshd:RUNID@file:PATH` for a swarm with a static registry.

    run_id: 40 hex digits; it pins the run spec that peers hand out (DESIGN section 1). Exactly one of `addresses`
    and `file` is set.
    """

    run_id: str
    addresses: tuple[PeerAddress, ...] = ()
    file: Path | None = None

    @classmethod
    def parse(cls, text: str) -> SwarmLink:
        """Read a link. Raises ConfigError (field `link`) that names the wrong part and shows a right example."""
        scheme, colon, rest = text.strip().partition(":")
        if scheme != "meshd" or not colon:
            raise _wrong(text, "it does not begin with `meshd:`")
        run_id, at, where = rest.partition("@")
        if not _RUN_ID.fullmatch(run_id):
            raise _wrong(text, f"the run id {run_id!r} is not 40 hex digits (lower case)")
        if not at or not where:
            raise _wrong(text, "after the run id, `@` and at least one address are missing")
        if where.startswith("file:"):
            if where == "file:":
                raise _wrong(text, "`file:` names no file")
            return cls(run_id, file=Path(where.removeprefix("file:")))
        addresses = []
        for number, part in enumerate(where.split(","), start=1):
            try:
                addresses.append(PeerAddress.parse(part))
            except ValueError as error:
                raise _wrong(text, f"address {number}, {part!r}: {error}") from error
        return cls(run_id, tuple(addresses))

    def __str__(self) -> str:
        where = f"file:{self.file}" if self.file is not None else ",".join(map(str, self.addresses))
        return f"meshd:{self.run_id}@{where}"


def _wrong(text: str, problem: str) -> ConfigError:
    return ConfigError(
        "link", text, problem, f"paste the whole link as the operator gave it, such as {_EXAMPLE}"
    )
