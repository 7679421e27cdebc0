"""Streams and calls between peers: the interface (`base`), over gRPC, and in memory."""

import os

# Read by grpc when it is imported. Fork handlers stop the world at every fork, and a fork with calls under way hangs
# (DESIGN section 10); nothing here forks.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# grpc's own log repeats each lost connection; ours has one line per loss (C10). Set it to see grpc's.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
