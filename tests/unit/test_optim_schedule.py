"""Learning rate, step gate and token counter: everything follows global tokens (DESIGN section 2.6)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_helpers import make_run

from meshd.config.runspec import OptimSpec
from meshd.optim.schedule import StepGate, TokenCounter, learning_rate, outgrown
from meshd.proto import meshd_pb2 as pb

# ---- learning rate --------------------------------------------------------------------------------------------------


def rates(total: int, **spec: object) -> list[float]:
    optim = OptimSpec.model_validate({"lr": 1.0, **spec})
    return [learning_rate(optim, step, total) for step in range(total + 3)]


def test_warm_up_rises_to_the_peak_and_never_starts_at_zero() -> None:
    assert rates(8, warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, *[1.0] * 8]


def test_linear_falls_to_its_end_and_stays_there() -> None:
    got = rates(6, warmup_steps=2, schedule="linear", min_lr_ratio=0.2)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    got = rates(10, warmup_steps=2, schedule="cosine", min_lr_ratio=0.1)
    assert got[2] == 1.0
    assert got[6] == pytest.approx(0.55)
    assert got[10:] == pytest.approx([0.1] * 3)
    assert got[2:11] == sorted(got[2:11], reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 5, 9])
def test_a_run_shorter_than_its_warm_up_and_one_without_still_have_rates(schedule: str, warmup: int) -> None:
    for total in (1, 5):
        for rate in rates(total, warmup_steps=warmup, schedule=schedule):
            assert 0.0 < rate <= 1.0


# ---- step gate ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    replicas=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    seed=st.integers(0, 999),
)
def test_replicas_together_take_one_step_each_per_batch_however_unequal_they_are(
    replicas: int, sizes: list[int], seed: int
) -> None:
    """A slow replica takes fewer steps, a fast one more; on average a stage's replica steps once per batch."""
    rng = random.Random(seed)
    batch = 100 * replicas  # a share holds the largest microbatch
    gates = [StepGate(batch) for _ in range(replicas)]
    speed = [rng.random() + 0.1 for _ in gates]
    steps = tokens = 0
    for _ in range(400):
        gate = rng.choices(gates, speed)[0]
        size = rng.choice(sizes)
        tokens += size
        steps += gate.add(size, replicas)
    # What is not yet stepped on is less than a share at each.
    assert 0 <= tokens - steps * batch / replicas < batch


def test_what_goes_over_a_share_counts_toward_the_next() -> None:
    gate = StepGate(10)
    assert [gate.add(4, 1) for _ in range(10)] == [
        False, False, True, False, True, False, False, True, False, True,
    ]  # fmt: skip


def test_a_share_follows_the_number_of_replicas() -> None:
    gate = StepGate(12)
    assert [gate.add(4, 1) for _ in range(2)] == [False, False]
    # A second replica came: a share is 6 tokens. Of the 9 added so far, 3 are left over.
    assert [gate.add(1, 2), gate.add(2, 2), gate.add(1, 2)] == [True, False, True]
    # It has gone again: a share is 12.
    assert [gate.add(4, 1), gate.add(4, 1), gate.add(4, 1)] == [False, False, True]


def test_a_share_that_shrinks_gives_no_burst_of_steps() -> None:
    gate = StepGate(1000)
    assert not gate.add(999, 1)
    # 999 tokens are 99 shares of 10, but they are one gradient: it is one step, and at most one share is left over.
    assert [gate.add(1, 100) for _ in range(10)] == [True, True, *[False] * 8]


@pytest.mark.parametrize("size", [30, 64, 1000])
def test_microbatches_larger_than_a_share_are_a_step_each_and_leave_no_debt(size: int) -> None:
    """Steps are then larger and fewer than once per batch; when shares grow again, they are right at once."""
    replicas, batch = 4, 100
    gates = [StepGate(batch) for _ in range(replicas)]
    taken = [gate.add(size, replicas) for _ in range(50) for gate in gates]
    assert all(taken)
    per_replica = len(taken) // replicas
    assert per_replica == 50
    # The others have gone. At most the one share that was left over counts toward the first step.
    gate = gates[0]
    steps = sum(gate.add(10, 1) for _ in range(100))
    assert steps == 1000 // batch


def test_a_batch_that_a_stages_replicas_outgrow_is_said_with_the_numbers() -> None:
    spec = make_run([2], optim={"inner_batch": 8}, data={"microbatch": 4}).spec
    assert outgrown(spec, 1) is outgrown(spec, 2) is None
    told = outgrown(spec, 3)
    assert told is not None
    assert "3 replicas" in told
    assert "12 together, where optim.inner_batch = 8: steps are 1.5 times as large" in told
    assert "Fix: optim.inner_batch = 12 or more" in told


def test_no_live_replica_known_counts_as_one() -> None:
    assert StepGate(5).add(5, 0)


# ---- token counter --------------------------------------------------------------------------------------------------

counts = st.lists(
    st.builds(
        pb.Count,
        origin=st.sampled_from(["a", "b", "c", "d"]),
        tokens=st.integers(0, TokenCounter.MAX_TOKENS),
    ),
    max_size=6,
)


def counter(*messages: list[pb.Count]) -> TokenCounter:
    made = TokenCounter()
    for message in messages:
        made.merge(message)
    return made


@given(counts, counts, counts)
def test_merging_is_commutative_associative_and_idempotent(
    a: list[pb.Count], b: list[pb.Count], c: list[pb.Count]
) -> None:
    abc = counter(a, b, c)
    assert abc.state() == counter(c, a, b).state()
    assert abc.state() == counter(a, counter(b, c).to_proto()).state()
    assert abc.state() == counter(a, b, c, a, b, abc.to_proto()).state()


@given(counts, counts)
def test_it_only_grows(a: list[pb.Count], b: list[pb.Count]) -> None:
    before, after = counter(a), counter(a, b)
    assert after.total >= before.total
    assert all(after.get(origin) >= tokens for origin, tokens in before.state().items())


def test_own_commits_advance_it_and_never_set_it_back() -> None:
    mine = counter([pb.Count(origin="me", tokens=7)])
    mine.advance("me", 5)
    assert mine.total == 7
    mine.advance("me", 9)
    assert (mine.total, mine.get("me"), mine.get("other")) == (9, 9, 0)


def test_what_a_lying_peer_sends_stays_within_memory_and_message_size() -> None:
    """Names too long to pass on, numbers too large to add up, more origins than any run has: none of it may make
    this peer's own messages unsendable."""
    lies = counter(
        [pb.Count(origin=f"peer-{i:0120d}", tokens=TokenCounter.MAX_TOKENS) for i in range(1000)],
        [pb.Count(origin="x" * 1_000_000, tokens=1), pb.Count(tokens=5)],
        [pb.Count(origin="peer-" + "0" * 120, tokens=2**64 - 1)],
    )
    message = pb.Offer(committed=lies.to_proto())
    assert len(message.committed) == TokenCounter.MAX_ORIGINS
    assert message.ByteSize() < 1 << 16
    pb.StatusReply(global_tokens=lies.total)  # fits 64 bits


def test_a_known_origin_grows_on_when_the_table_is_full() -> None:
    full = counter([pb.Count(origin=f"p{i}", tokens=1) for i in range(TokenCounter.MAX_ORIGINS)])
    full.merge([pb.Count(origin="p3", tokens=10), pb.Count(origin="late", tokens=10)])
    assert (full.get("p3"), full.get("late")) == (10, 0)
