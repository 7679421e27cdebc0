"""Chaos on a local swarm of real processes: faults by a schedule, and what the ledgers, logs and the checkpoint say."""
