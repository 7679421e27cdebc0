"""The `meshd` command.

Exit codes: 0 done; 1 failed; 2 wrong usage, run spec, link, or data; 3 this machine lacks something (a port, memory,
disk, permission); 4 peers cannot be reached; 5 the other side belongs to another run or protocol; 130 interrupted.
A failure that a user can cause is one message on standard error; a traceback is a bug.

torch, grpc and hivemind are imported inside the commands: `meshd --help` is instant, and what they read from the
environment is set before they load.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from meshd import __version__
from meshd.config.load import load_peer_config, load_run_spec
from meshd.config.template import render_template
from meshd.errors import ConfigError, MeshdError, ResourceError

if TYPE_CHECKING:
    from meshd.config.peer import PeerConfig
    from meshd.config.runspec import RunSpec

R = TypeVar("R")

_EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, run spec, link or data, 3 this machine lacks something (port, "
    "memory, disk, permission), 4 peers cannot be reached, 5 another run or protocol, 130 interrupted."
)

app = typer.Typer(
    name="meshd",
    help="Adapt a pretrained language model over the internet, on machines that volunteers own.",
    epilog=_EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Kind(StrEnum):
    run = "run"
    peer = "peer"


class RoleName(StrEnum):
    stage = "stage"
    seed = "seed"
    anchor = "anchor"


class Level(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogFormat(StrEnum):
    console = "console"
    json = "json"


RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="The run spec; `meshd init` writes a template.")
]
Config = Annotated[Path | None, typer.Option(metavar="PEER.toml", help="Peer config; options override it.")]
RoleOption = Annotated[
    RoleName | None,
    typer.Option(
        help="Compute a stage; measure the whole model on clean passes; or only bootstrap and keep checkpoints."
    ),
]
Stage = Annotated[int | None, typer.Option(help="Stage to hold; left out: where the swarm needs it most.")]
Listen = Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")]
Announce = Annotated[str | None, typer.Option(help="Address that others dial (default: --listen).")]
Port = Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one.")]
DhtPort = Annotated[int | None, typer.Option(help="libp2p port; 0 takes a free one.")]
HttpPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        parser=lambda text: int(text) if text.isdecimal() else text,
        help="Port of /healthz; 0 takes a free one, `off` serves none.",
    ),
]
StateDir = Annotated[
    Path | None, typer.Option(help="Identity, snapshots, caches (default ~/.local/state/meshd).")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Offload = Annotated[
    bool | None,
    typer.Option("--offload", help="As an anchor: keep stages on the CPU, one at a time on the device."),
]
Threads = Annotated[int | None, typer.Option(help="torch threads; 0: all cores.")]
Name = Annotated[str | None, typer.Option(help="Name for people (default: host name).")]
LogLevel = Annotated[Level | None, typer.Option(help="Least severe event that is logged.")]
LogForm = Annotated[
    LogFormat | None, typer.Option("--log-format", help="For people, or one JSON object a line.")
]


def main() -> None:
    """Entry point of the console script: runs the command line and exits with its code."""
    try:
        app(prog_name="meshd")
    except MeshdError as error:
        print(f"meshd: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"meshd {__version__}")
        raise typer.Exit


@app.callback(epilog=_EXIT_CODES)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("run.toml"),
    kind: Annotated[Kind, typer.Option(help="A run spec, or the config of one peer.")] = Kind.run,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented template of a run spec (or, with --kind peer, of a peer config)."""
    text = render_template(kind.value)
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            "file", str(path), "is there already", "choose another name, or add --force"
        ) from None
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from None
    use = f"meshd swarm {path}" if kind is Kind.run else f"meshd join LINK --config {path}"
    print(f"wrote {path}; edit it, then: {use}")


@app.command()
def run(
    run_file: RunFile,
    role: RoleOption = None,
    stage: Stage = None,
    listen: Listen = None,
    announce: Announce = None,
    port: Port = None,
    dht_port: DhtPort = None,
    http_port: HttpPort = None,
    state_dir: StateDir = None,
    device: Device = None,
    threads: Threads = None,
    name: Name = None,
    config: Config = None,
    log_level: LogLevel = None,
    log_format: LogForm = None,
    peers: Annotated[
        str | None, typer.Option(metavar="LINK", help="Join these peers of the same run.")
    ] = None,
    registry: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="TOML file that lists all peers, in place of the DHT (see README)."
        ),
    ] = None,
) -> None:
    """Start a run as its operator: prepares model and data, then serves them; prints the link for `meshd join`."""
    if peers is not None and registry is not None:
        raise ConfigError(
            "--registry", str(registry), "--peers says already where peers are", "give one of the two"
        )
    spec = load_run_spec(run_file)
    options = _given(locals())
    # Absolute: the link that is logged names the file.
    listed = registry.absolute() if registry is not None else None
    raise typer.Exit(_daemon(load_peer_config(config, options), spec, peers, listed))


@app.command()
def join(
    link: Annotated[str, typer.Argument(metavar="LINK", help="The swarm link that the operator gave you.")],
    role: RoleOption = None,
    stage: Stage = None,
    listen: Listen = None,
    announce: Announce = None,
    port: Port = None,
    dht_port: DhtPort = None,
    http_port: HttpPort = None,
    state_dir: StateDir = None,
    device: Device = None,
    offload: Offload = None,
    threads: Threads = None,
    name: Name = None,
    config: Config = None,
    log_level: LogLevel = None,
    log_format: LogForm = None,
) -> None:
    """Join a run as a volunteer: needs the link and nothing else."""
    options = _given(locals())
    raise typer.Exit(_daemon(load_peer_config(config, options), None, link))


@app.command()
def status(
    state_dir: StateDir = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="gRPC address of a daemon.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reply as JSON.")] = False,
) -> None:
    """Show what a daemon and its swarm do."""
    prepare_environment(threads=1)
    from google.protobuf import json_format

    from meshd.observe.status import daemon_address, fetch_status, status_view
    from meshd.transport.grpc_client import GrpcTransport

    where = address or daemon_address(load_peer_config(None, {"state_dir": state_dir}).state_dir)

    async def ask() -> Any:
        transport = GrpcTransport()
        try:
            return await fetch_status(transport, where)
        finally:
            await transport.close()

    reply = run_loop(ask())
    if as_json:
        # All fields, or a script could not tell "no" from "not said".
        print(
            json_format.MessageToJson(
                reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
        )
    else:
        Console().print(status_view(reply))


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write; made when missing.")],
    link: Annotated[str | None, typer.Argument(metavar="[LINK]", help="Swarm to gather from.")] = None,
    state_dir: StateDir = None,
    watermark: Annotated[
        int | None, typer.Option(help="Global tokens of the snapshot (default: newest).")
    ] = None,
) -> None:
    """Write the newest consistent snapshot as a directory that transformers loads."""
    prepare_environment(threads=0)
    from meshd.observe.log import setup_logging

    setup_logging("warning")
    from meshd.discovery.link import SwarmLink
    from meshd.peer.export import export_checkpoint

    state = load_peer_config(None, {"state_dir": state_dir}).state_dir
    source = SwarmLink.parse(link) if link is not None else state
    tokens = run_loop(export_checkpoint(source, directory.absolute(), watermark=watermark))
    print(f"checkpoint: {directory} ({tokens} tokens)")


@app.command()
def swarm(
    run_file: RunFile,
    replicas: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Replicas of each stage (default: one each).")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="State, logs, checkpoint and plot (default runs/NAME).")
    ] = None,
    anchors: Annotated[int, typer.Option(min=0, help="Anchors: peers that measure the whole model.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="torch threads of each process.")] = 1,
    prompt: Annotated[str | None, typer.Option(help="Begin the sample continuations with this.")] = None,
    no_ui: Annotated[bool, typer.Option("--no-ui", help="Plain lines instead of a live view.")] = False,
) -> None:
    """Run a whole swarm on this machine: separate processes, supervised, from start to exported checkpoint."""
    prepare_environment(threads=0)
    from meshd.swarm.main import SwarmOptions, run_swarm
    from meshd.swarm.replicas import replicas_of

    spec = load_run_spec(run_file)
    options = SwarmOptions(
        run_file=run_file.absolute(),
        spec=spec,
        replicas=replicas_of(replicas, spec.model.stages),
        anchors=anchors,
        directory=(directory or Path("runs") / spec.name).absolute(),
        threads=threads,
        prompt=prompt,
        live=not no_ui and sys.stdout.isatty(),
    )
    # Plain asyncio: it starts children without fork handlers of its own, and a supervisor has no need for speed.
    raise typer.Exit(asyncio.run(run_swarm(options)))


@app.command()
def codec(
    run_file: RunFile,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            metavar="FORWARD/BACKWARD",
            help="Codecs to measure; repeatable. One pair for all boundaries, or one each with `;` between. Left out: "
            "those of the run spec, and references.",
        ),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Microbatches of held-out text that are measured.")] = 4,
    fit: Annotated[int, typer.Option(min=1, help="Microbatches of training text that fit priors.")] = 16,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot, .png, .svg or .pdf (default codec.png).")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers there.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="torch threads; 0: all cores.")] = 0,
) -> None:
    """Measure what codecs cost this model on this text: bytes, errors, loss and gradients, at every boundary."""
    spec = load_run_spec(run_file)
    prepare_environment(threads)
    from meshd.observe.log import setup_logging

    setup_logging("warning")
    from meshd.diagnosis.diagnose import Effort
    from meshd.diagnosis.main import CodecOptions, run_codec

    run_codec(CodecOptions(spec, tuple(codecs or ()), Effort(batches, fit), json_file, plot, threads))


def prepare_environment(threads: int) -> None:
    """Set what torch, grpc and tokenizers read when they load. threads: of OpenMP; 0 leaves the number to them."""
    # Threads that spin while they wait cost 3 to 4x when processes share cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # grpc's fork handlers can hang a parent with calls in flight; nothing here forks.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if threads > 0:
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


def run_loop(work: Coroutine[Any, Any, R]) -> R:
    """Run `work` to its end on uvloop where it is installed, on asyncio elsewhere."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def _daemon(config: PeerConfig, spec: RunSpec | None, link: str | None, registry: Path | None = None) -> int:
    """Run one daemon to its end; its exit code."""
    prepare_environment(config.threads)
    from meshd.observe.log import setup_logging

    setup_logging(config.log_level, config.log_format)
    from meshd.discovery.link import SwarmLink

    parsed = SwarmLink.parse(link) if link is not None else None
    from meshd.ground import hold_ground

    with hold_ground(config) as ground:
        # Here the seconds pass that torch and transformers take to load: what a user does wrong is known before.
        from meshd.daemon import run_daemon
        from meshd.swarm.orphan import PARENT_VARIABLE, ending_with_parent

        async def work() -> int:
            async with ending_with_parent(os.environ.get(PARENT_VARIABLE)):
                return await run_daemon(ground, spec, parsed, registry)

        return run_loop(work())


def _given(arguments: Mapping[str, object]) -> dict[str, object]:
    """The options of a command that are fields of the peer config and were given."""
    from meshd.config.peer import PeerConfig

    return {
        name: str(value) if isinstance(value, StrEnum) else value
        for name, value in arguments.items()
        if name in PeerConfig.model_fields and value is not None
    }
