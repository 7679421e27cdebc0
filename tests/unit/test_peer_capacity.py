"""What a device could pass, from what it has passed."""

from __future__ import annotations

from meshd.peer.capacity import Capacity


def test_idle_time_does_not_count_and_other_work_does() -> None:
    """A microbatch of 64 tokens every 10 s, at work on it for 0.5 s, and as long on other things."""
    capacity = Capacity(64)
    for second in range(200):
        capacity.look(float(second), second // 10, second // 10 * 1.0)
        if second < 80:
            assert capacity.tokens_per_s == 0.0, "too little was seen"
    assert capacity.tokens_per_s == 64.0


def test_work_before_the_first_microbatch_does_not_count() -> None:
    """An evaluation of the base model, for a minute."""
    capacity = Capacity(64)
    for second in range(60):
        capacity.look(float(second), 0.0, float(second))
    for second in range(60, 80):
        capacity.look(float(second), second - 59, 59.0 + (second - 59) * 0.5)
    assert capacity.tokens_per_s == 128.0


def test_it_follows_a_change_within_the_window_and_stays_while_nothing_passes() -> None:
    capacity, passed, busy = Capacity(100), 0, 0.0
    for second in range(400):
        if second < 300:
            passed += 1
            busy += 0.5 if second < 150 else 0.25
        capacity.look(float(second), passed, busy)
        if second == 149:
            assert capacity.tokens_per_s == 200.0
    assert capacity.tokens_per_s == 400.0
