"""One daemon: its parts, wired together."""
