"""What exchanges hold in memory. Pure."""

from meshd.config.runspec import GossipSpec
from meshd.gossip.forms import BF16

SEGMENT_BLOCKS = 1 << 20
"""Blocks of values that cross at a time; both sides hold no more than one such segment that is on its way."""
READ_AHEAD = 4
"""Segments of bf16 that are read at a time: every read waits for the job that the device is at, which may take longer
than a segment takes to cross."""

LISTENERS = 2
"""Exchanges with listeners that a replica takes part in at a time, beside one of its own."""

# Of a value, for an outer step: fp32 after its last exchange, momentum in bf16 (meshd/gossip/outer.py).
_OUTER_BYTES = 6
# Of one that is read ahead: its position, int64, and the value, fp32. Of one that crosses: position, step, dither,
# residues and differences on top.
_AHEAD_BYTES, _CROSSING_BYTES = 12, 40


def gossip_bytes(values: int, spec: GossipSpec) -> int:
    """Memory that a replica of so many values takes for exchanges at most, about."""
    read = READ_AHEAD * SEGMENT_BLOCKS
    if spec.bits != BF16:
        # Residues are read at once; a byte budget may want all values.
        read = max(read, -(-values // (1 if spec.bps else spec.subset)))
    outer = _OUTER_BYTES * values if spec.outer_momentum else 0
    one = _AHEAD_BYTES * min(values, read) + _CROSSING_BYTES * min(values, SEGMENT_BLOCKS)
    return (1 + LISTENERS) * one + outer
