"""What a replica does between having a state of its stage and counting: it follows one that works (DESIGN section 6:
weight 0).

The state that a newcomer brings is as old as the bundle it came from and the time its transfer took; that of a peer
started again is as old as its last save. Averaged at full weight it would draw the others back.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from meshd.errors import MeshdError
from meshd.gossip.exchange import ExchangeRefused
from meshd.gossip.service import Gossip
from meshd.observe.log import event
from meshd.pipeline.stage import Replica, Stage

log = logging.getLogger(__name__)

# Without any answer for so long, after so many tries with each replica, this peer counts with what it has: it may be
# all that the stage has left.
_SILENT_S, _TRIES = 15.0, 2
# The same when replicas answer, but are busy with others, or break off, again and again.
_PATIENCE_S = 600.0
# One that was busy, or failed, is asked again after so long.
_BUSY_S, _FAILED_S = 0.5, 3.0


async def catch_up(gossip: Gossip, stage: Stage, ahead: Callable[[], Sequence[Replica]]) -> bool:
    """Take over the values of one of the working replicas that are `ahead` of the state here. False: there was none, or
    none that gave them.

    ahead: those known now; never others that listen, so no two follow each other. One log line for each replica that
    fails, one for how it ends.
    """
    clock, began = stage.clock, stage.clock.monotonic()
    heard, failed, tries = began, dict[str, float](), Counter[str]()
    before = stage.runtime.version

    def met() -> None:
        nonlocal heard
        heard = clock.monotonic()

    while replicas := list(ahead()):
        now = clock.monotonic()
        silent = now - heard > _SILENT_S and all(tries[replica.peer_id] >= _TRIES for replica in replicas)
        if silent or now - began > _PATIENCE_S:
            names = ", ".join(sorted(replica.name for replica in replicas))
            why = (
                f"no answer for {now - heard:.0f} s"
                if silent
                else f"no whole exchange in {now - began:.0f} s"
            )
            event(
                log, "not_caught_up", level=logging.WARNING, reason=f"{names}: {why}", weight_version=before
            )
            return False
        stage.rng.shuffle(replicas)
        for replica in replicas:
            if clock.monotonic() - failed.get(replica.peer_id, began - _FAILED_S) < _FAILED_S:
                continue
            try:
                report = await gossip.follow(replica, met)
            except ExchangeRefused:
                met()
            except MeshdError as error:
                tries[replica.peer_id] += 1
                if tries[replica.peer_id] == 1:
                    event(log, "not_followed", level=logging.WARNING, peer=replica.name, reason=str(error))
                failed[replica.peer_id] = clock.monotonic()
            else:
                event(
                    log,
                    "caught_up",
                    peer=replica.name,
                    steps=stage.runtime.version - before,
                    weight_version=stage.runtime.version,
                    distance=report.distance,
                )
                return True
        await clock.sleep(_BUSY_S * (0.5 + stage.rng.random()))
    return False
