"""The WAN lab: a swarm of real daemons on one machine, each behind a link that the kernel limits (docs/lab.md)."""
