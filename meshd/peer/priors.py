"""A stage peer's part in the anchor circuit, put together."""

from __future__ import annotations

import asyncio

from meshd.anchor.notices import Bounds
from meshd.anchor.refresh import apart
from meshd.anchor.relay import Relay, User
from meshd.anchor.spreading import Offering, drop_leftovers
from meshd.anchor.users import Codecs, Weights
from meshd.peer.join import Supply
from meshd.pipeline.service import Pipeline
from meshd.pipeline.stage import Stage
from meshd.priors.boundary import most_bytes
from meshd.proto import meshd_pb2 as pb


class StagePriors:
    """`relay` takes priors, and `run` uses them and passes them on."""

    def __init__(self, stage: Stage, number: int, pipeline: Pipeline, supply: Supply) -> None:
        """number: of the stage."""
        runtime, directory, store = stage.runtime, supply.directory, stage.around.priors
        run, self._store = runtime.run, supply.store
        spec, hidden = run.spec, run.resolved.hidden
        self._codecs = {
            hop.index: Codecs(
                runtime.crossings[hop.index],
                hidden,
                store,
                pipeline.adopt,
                lambda: stage.counter.total,
                lambda author, reason: self.relay.bar(author, reason),
            )
            for hop in runtime.model.hops
            if not hop.head and runtime.crossings[hop.index].adapts
        }
        self._weights = Weights(number, runtime, stage.clock, stage.metrics)
        users: dict[tuple[pb.PriorKind, int], User] = {}
        most: dict[tuple[pb.PriorKind, int], int] = {}
        for boundary, codecs in self._codecs.items():
            users[pb.PRIOR_KIND_BOUNDARY, boundary] = codecs
            most[pb.PRIOR_KIND_BOUNDARY, boundary] = most_bytes(hidden, store.rank)
        if runtime.corrected_weights():
            users[pb.PRIOR_KIND_WEIGHTS, number] = self._weights
            most[pb.PRIOR_KIND_WEIGHTS, number] = self._weights.most_bytes
        bounds = Bounds(
            run.run_id,
            run.stages,
            len(stage.hops) - 1,
            spec.batch_tokens,
            spec.anchors.passes * spec.data.microbatch * spec.data.seq_len,
            most,
            *apart(spec),
        )
        self.relay = Relay(
            bounds,
            users,
            supply.store,
            supply.named,
            Offering(stage.peer_id, run, stage.transport, stage.clock, stage.metrics),
            lambda: directory.replicas(number),
            directory.address,
            lambda: (runtime.version, stage.counter.total),
            stage.clock,
            stage.metrics,
            stage.rng,
        )

    async def run(self) -> None:
        """Until cancelled."""
        # Their notices are not kept over a restart: nobody will ask for them here.
        await asyncio.to_thread(drop_leftovers, self._store, pb.PRIOR_KIND_WEIGHTS)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.relay.run())
            tasks.create_task(self._weights.run())
            for codecs in self._codecs.values():
                tasks.create_task(codecs.run())
