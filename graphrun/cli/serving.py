"""The command ``serve``."""

from __future__ import annotations

import ipaddress
import tempfile
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import graphrun
from graphrun.cli.common import app, cache_folder, cards_for, load, parse_reuse, say, with_budget
from graphrun.cli.options import NameList, PlanOptions, ReuseOption, shared
from graphrun.cli.placing import ClusterFile, open_cluster
from graphrun.errors import InputError
from graphrun.extras import install_command
from graphrun.limits import LIMITS
from graphrun.units import parse_seconds, parse_size

if TYPE_CHECKING:
    from graphrun.model.problem import Hardware

SHARED = (
    "vram",
    "ram",
    "memory",
    "pinned",
    "disk",
    "hardware",
    "device",
    "allow",
    "keep",
    "exclude",
    "pin",
    "reserve",
    "trust_package",
    "dtype",
    "no_cache",
)


@app.command()
@shared(*SHARED)
def serve(
    graphs: Annotated[
        list[Path],
        typer.Argument(help="Graph files, or names of graphs (graphrun list).", show_default=False),
    ],
    options: PlanOptions,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Other than this machine's own needs --keys.",
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0: any free one.", metavar="N", min=0, max=65535)
    ] = 8000,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys: a name, a SHA-256 and optionally 30/min a line. SIGHUP reads "
            "it again.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    allow_host: Annotated[
        NameList,
        typer.Option(
            help="Another host name of the server, such as the proxy's; *.example.com: all below "
            "it. Repeatable.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    allow_origin: Annotated[
        NameList,
        typer.Option(
            help="Let web pages of this origin use the server: https://images.example.com. "
            "Repeatable.",
            metavar="ORIGIN",
            show_default=False,
        ),
    ] = None,
    queue: Annotated[
        str,
        typer.Option(help="Refuse requests whose predicted wait is longer.", metavar="TIME"),
    ] = "300s",
    drain: Annotated[
        str,
        typer.Option(help="Time for admitted requests to end after SIGTERM.", metavar="TIME"),
    ] = "30s",
    max_body: Annotated[
        str, typer.Option(help="Largest request without files.", metavar="SIZE")
    ] = "1M",
    max_upload: Annotated[
        str, typer.Option(help="Largest request with files.", metavar="SIZE")
    ] = "20M",
    max_prompt: Annotated[
        int, typer.Option(help="Most characters of a text.", metavar="N", min=1)
    ] = 10_000,
    max_pixels: Annotated[
        int, typer.Option(help="Most pixels of a picture.", metavar="N", min=1)
    ] = 2**22,
    max_steps: Annotated[int, typer.Option(help="Most steps.", metavar="N", min=1)] = 100,
    max_n: Annotated[int, typer.Option(help="Most pictures of a request.", metavar="N", min=1)] = 4,
    arrival: Annotated[
        str,
        typer.Option(help="Time for headers to arrive, and again for the body.", metavar="TIME"),
    ] = "20s",
    idle: Annotated[
        str,
        typer.Option(
            help="Longest silence of a client: no request, no byte of a body, none read of an "
            "answer.",
            metavar="TIME",
        ),
    ] = "5s",
    connections: Annotated[
        int,
        typer.Option(
            help="Most open connections. At the limit, the longest idle one is closed.",
            metavar="N",
            min=1,
        ),
    ] = 512,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder for jobs, which go on after a restart of the server.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Be ready (/readyz) once every graph has made a picture.",
        ),
    ] = False,
    log: Annotated[
        str, typer.Option(help="Form of the log: text or json.", metavar="FORM")
    ] = "text",
    reuse: ReuseOption = "encoded",
    cluster: ClusterFile = None,
) -> None:
    """Serve graphs that make pictures or videos over HTTP (docs/serving.md).

    Has OpenAI's images and videos API, jobs, metrics and a web page.
    """
    if missing_packages := [
        name
        for name in ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
        if find_spec(name) is None
    ]:
        raise InputError(f"{', '.join(missing_packages)} not installed: {install_command('serve')}")
    from graphrun.devices import Budget, limits_for, resolved_budgets
    from graphrun.serve.keys import read_keys
    from graphrun.serve.origins import host_of, origin_of
    from graphrun.serve.server import serve as run
    from graphrun.serve.settings import Bounds, Settings

    if log not in ("text", "json"):
        raise InputError(f"--log {log}: it is text or json")
    owners = read_keys(keys) if keys is not None else {}
    if not owners and not _is_loopback(host):
        raise InputError(
            f"--host {host} without --keys: anyone who reaches this machine could use it; "
            "add --keys FILE"
        )
    hosts = tuple(map(host_of, allow_host or ()))
    origins = tuple(map(origin_of, allow_origin or ()))
    for option, values in {"--allow-host": hosts, "--allow-origin": origins}.items():
        if "*" in values and not owners:
            raise InputError(
                f"{option} '*' without --keys: any web page could use the server; add --keys FILE"
            )
    pipeline_graphs = [load(path, options) for path in graphs]
    for graph in pipeline_graphs:
        graph.refuse_list()
        if not {"image", "video"}.intersection(graph.kinds().values()):
            raise InputError(
                f"{graph.name} makes {', '.join(graph.kinds().values())}, and no pictures or "
                "videos: leave it out"
            )
    names = [graph.name for graph in pipeline_graphs]
    if duplicates := {name for name in names if names.count(name) > 1}:
        raise InputError(
            f"two graphs are called {', '.join(sorted(duplicates))}: give one of them another name"
        )
    with tempfile.TemporaryDirectory(prefix="graphrun-serve-") as name:
        folder = Path(name)
        cache = cache_folder(options.no_cache) or folder / "cache"
        hardware: tuple[Hardware, ...] = ()
        if cluster is not None:
            devices = open_cluster(cluster, options)
            if find_spec("ray") is None:
                raise InputError(
                    f"--cluster runs on Ray, which is not installed: {install_command('cluster')}"
                )
            budgets = {
                name: options.estimate_arguments[name]
                for name in ("allow", "keep", "exclude", "pin", "reserve")
            }
        else:
            devices, hardware = None, tuple(cards_for(options, cache, to_run=True))
            options = with_budget(options, hardware[0])
            budgets = {"vram": options.vram} | {
                name: value
                for name, value in options.estimate_arguments.items()
                if name not in ("runs", "until")
            }
            limits = limits_for(Budget.of(budgets), hardware)
            budgets = resolved_budgets(budgets, limits, hardware[0])
        bounds = Bounds(
            parse_size(max_body), parse_size(max_upload), max_prompt, max_pixels, max_steps, max_n
        )
        bounds = replace(
            bounds,
            body_seconds=_above_zero("--arrival", arrival),
            idle_seconds=_above_zero("--idle", idle),
        )
        settings = Settings(
            graphs=tuple(graphs),
            trust=tuple(options.trust_package or ()),
            dtype=options.dtype,
            budgets=budgets,
            hardware=hardware,
            cache=cache,
            reuse=parse_reuse(reuse),
            folder=folder,
            limits=asdict(LIMITS),
            version=graphrun.__version__,
            bounds=bounds,
            keys=owners,
            keys_file=keys.resolve() if keys is not None else None,
            queue_seconds=parse_seconds(queue),
            drain_seconds=parse_seconds(drain),
            connections=connections,
            allow_hosts=hosts,
            allow_origins=origins,
            cluster=devices,
            state=state,
            warms=warm,
            log_as_json=log == "json",
        )
        run(settings, host, port, say)


def _above_zero(option: str, text: str) -> float:
    if (seconds := parse_seconds(text, name=option)) <= 0:
        raise InputError(
            f"{option} {text}: every request would be too late; type a time above 0, such as 5s"
        )
    return seconds


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
