"""Stands in for the `meshd` command in tests of the supervisor: speaks Status over gRPC, trains nothing.

Called as the supervisor calls meshd. FAKE_SCRIPT (JSON) says what peers do: {"stage1-0": {"exit": [3, 9]}} ends the
first start with code 3, the second with 9; further starts run. {"seed": {"finish_when": 3}}: finished once so many
peers have registered; "leave_when": leaves by itself then. "stubborn": ignores SIGTERM. "child": leaves a child process
behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc

from meshd.observe.daemonfile import DaemonFile
from meshd.proto import meshd_pb2 as pb
from meshd.proto import meshd_pb2_grpc as rpc


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def main() -> None:
    command = sys.argv[1]
    if command == "export":
        if "export-fails" in script():
            sys.exit("no snapshot is complete")
        dest = Path(sys.argv[2])
        dest.mkdir(parents=True)
        (dest / "config.json").write_text("{}")
        return
    state = Path(option("--state-dir"))
    name = option("--name")
    state.mkdir(parents=True, exist_ok=True)
    acts = script().get(name, {})
    starts = len(list(state.glob("start-*")))
    (state / f"start-{starts}-{os.getpid()}").write_text(json.dumps(sys.argv[1:]))
    if acts.get("child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    exits = acts.get("exit", [])
    if starts < len(exits):
        print(f"{name} fails for the test")
        if exits[starts] < 0:
            os.kill(os.getpid(), -exits[starts])
        sys.exit(exits[starts])
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if acts.get("stubborn") else stopped.set())
    if name == "seed":
        serve(state, acts)
    (state / "ready").touch()
    while not stopped.wait(0.02):
        if len(list(state.parent.glob("stage*/ready"))) >= acts.get("leave_when", 10**6):
            break
    (state / "left").touch()


class Peer(rpc.PeerServicer):
    def __init__(self, peers: Path, finish_when: int) -> None:
        self.peers, self.finish_when = peers, finish_when

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        ready = sorted(path.parent.name for path in self.peers.glob("stage*/ready"))
        finished = len(ready) >= self.finish_when
        tokens = 1000 if finished else 100 * len(ready)
        return pb.StatusReply(
            self=pb.PeerStatus(peer_id="seed", name="seed", role=pb.ROLE_SEED, stage=-1),
            peers=[pb.PeerStatus(peer_id=n, name=n, role=pb.ROLE_STAGE, stage=int(n[5])) for n in ready],
            global_tokens=tokens,
            stop_tokens=1000,
            run_name="fake",
            run_id="0" * 40,
            finished=finished,
            losses=[
                pb.LossPoint(tokens=100, loss=3.0, time=10),
                pb.LossPoint(tokens=1000, loss=2.5, time=20),
            ],
            evaluations=[pb.LossPoint(tokens=0, loss=3.1), pb.LossPoint(tokens=1000, loss=2.6)],
        )


def serve(state: Path, acts: dict) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    rpc.add_PeerServicer_to_server(Peer(state.parent, acts.get("finish_when", 10**6)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    globals()["kept"] = server
    DaemonFile(f"127.0.0.1:{port}", os.getpid(), "0" * 40, "meshd:fake").write(state)


def script() -> dict:
    return json.loads(os.environ.get("FAKE_SCRIPT", "{}"))


if __name__ == "__main__":
    main()
