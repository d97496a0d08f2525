"""The command ``serve``."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import graphrun
from graphrun.cli.common import app, cache_folder, cards_for, load, parse_reuse, say, with_budget
from graphrun.cli.options import NameList, PlanOptions, ReuseOption, option, shared
from graphrun.cli.placing import ClusterFile, open_cluster
from graphrun.errors import InputError
from graphrun.extras import install_command
from graphrun.limits import LIMITS
from graphrun.units import parse_seconds, parse_size

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


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """The options for the address, and for who may use the server, as typed."""

    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any but a loopback address needs --keys.",
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(help="Port; 0: any free one.", metavar="N", min=0, max=65535)
    ] = 8000
    keys: Annotated[
        Path | None,
        option(
            "File of API keys: a name, a SHA-256 and optionally 30/min a line.",
            "FILE",
        ),
    ] = None
    allow_host: Annotated[
        NameList,
        option(
            "Another host name of the server, such as the proxy's; *.example.com: all below "
            "it. Repeatable.",
            "NAME",
        ),
    ] = None
    allow_origin: Annotated[
        NameList,
        option(
            "Let web pages of this origin use the server: https://images.example.com. Repeatable.",
            "ORIGIN",
        ),
    ] = None
    allow_webhook: Annotated[
        NameList,
        option(
            "Let jobs name webhooks of this origin, at any path: https://hooks.example.com. "
            "Repeatable.",
            "ORIGIN",
        ),
    ] = None
    webhook_secret: Annotated[
        Path | None,
        option("File with the whsec_... that signs webhooks.", "FILE"),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return these fields of `Settings`. Raises InputError if anyone could use the server."""
        from graphrun.serve.keys import HINT, read_keys
        from graphrun.serve.origins import host_of, origin_of

        owners = read_keys(self.keys) if self.keys is not None else {}
        if not owners and not _is_loopback(self.host):
            raise InputError(
                f"--host {self.host} without --keys: anyone who reaches this machine could use "
                f"it; add --keys FILE, with a line NAME SHA256 for each key; {HINT}"
            )
        hosts = tuple(map(host_of, self.allow_host or ()))
        origins = tuple(map(origin_of, self.allow_origin or ()))
        for flag, values in {"--allow-host": hosts, "--allow-origin": origins}.items():
            if "*" in values and not owners:
                raise InputError(
                    f"{flag} '*' without --keys: any web page could use the server; add --keys FILE"
                )
        return {
            "keys": owners,
            "keys_file": self.keys and self.keys.resolve(),
            "allow_hosts": hosts,
            "allow_origins": origins,
        }

    def webhook_settings(self) -> dict[str, Any]:
        """Return these fields of `Settings`. Raises InputError for origins without a secret."""
        from graphrun.serve.webhooks import MAKE, read_secrets, webhook_origin

        values, secret = tuple(map(webhook_origin, self.allow_webhook or ())), self.webhook_secret
        if values and secret is None:
            raise InputError(
                "--allow-webhook without --webhook-secret FILE: receivers could not know who calls;"
                f" this prints a secret: {MAKE}"
            )
        return {"webhooks": values, "webhook_keys": read_secrets(secret) if secret else ()}


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """The options that limit requests and connections, as typed."""

    queue: Annotated[
        str,
        typer.Option(help="Refuse requests whose predicted wait is longer.", metavar="TIME"),
    ] = "300s"
    drain: Annotated[
        str,
        typer.Option(help="Time for admitted requests to end after SIGTERM.", metavar="TIME"),
    ] = "30s"
    max_body: Annotated[
        str, typer.Option(help="Largest request without files.", metavar="SIZE")
    ] = "1M"
    max_upload: Annotated[str, typer.Option(help="Largest request with files.", metavar="SIZE")] = (
        "20M"
    )
    max_prompt: Annotated[
        int, typer.Option(help="Most characters of a text.", metavar="N", min=1)
    ] = 10_000
    max_pixels: Annotated[
        int, typer.Option(help="Most pixels of a picture.", metavar="N", min=1)
    ] = 2**22
    max_steps: Annotated[int, typer.Option(help="Most steps.", metavar="N", min=1)] = 100
    max_n: Annotated[int, typer.Option(help="Most pictures of a request.", metavar="N", min=1)] = 4
    arrival: Annotated[
        str,
        typer.Option(help="Time for headers to arrive, and again for the body.", metavar="TIME"),
    ] = "20s"
    idle: Annotated[
        str,
        typer.Option(
            help="Longest silence of a client: no request, no byte of a body, none read of an "
            "answer.",
            metavar="TIME",
        ),
    ] = "5s"
    connections: Annotated[
        int,
        typer.Option(
            help="Most open connections. At the limit, the longest idle one is closed.",
            metavar="N",
            min=1,
        ),
    ] = 512

    def settings(self) -> dict[str, Any]:
        """Return these fields of `Settings`. Raises InputError."""
        from graphrun.serve.settings import Bounds

        return {
            "bounds": Bounds(
                parse_size(self.max_body, name="--max-body"),
                parse_size(self.max_upload, name="--max-upload"),
                self.max_prompt,
                self.max_pixels,
                self.max_steps,
                self.max_n,
                body_seconds=_above_zero("--arrival", self.arrival),
                idle_seconds=_above_zero("--idle", self.idle),
            ),
            "queue_seconds": parse_seconds(self.queue, name="--queue"),
            "drain_seconds": parse_seconds(self.drain, name="--drain"),
            "connections": self.connections,
        }


@app.command()
@shared(*SHARED)
def serve(
    graphs: Annotated[
        list[Path],
        typer.Argument(help="Graph files, or names of graphs (graphrun list).", show_default=False),
    ],
    options: PlanOptions,
    access: AccessOptions,
    limits: LimitOptions,
    state: Annotated[
        Path | None,
        option(
            "Folder for jobs, which go on after a restart of the server.",
            "FOLDER",
        ),
    ] = None,
    loras: Annotated[
        Path | None,
        option(
            "Folder of LoRAs (NAME.safetensors) that requests may name.",
            "FOLDER",
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
    _require_packages()
    from graphrun.serve.server import serve as run
    from graphrun.serve.settings import Settings, refuse_graphs
    from graphrun.temporary import TemporaryFolder

    if log not in ("text", "json"):
        raise InputError(f"--log {log!r} is not known; use text or json")
    access_settings = access.settings()
    refuse_graphs([load(path, options) for path in graphs])
    limit_settings = limits.settings()
    with TemporaryFolder("graphrun-serve-") as folder:
        cache = cache_folder(options.no_cache) or folder / "cache"
        settings = Settings(
            graphs=tuple(graphs),
            trust=tuple(options.trust_package or ()),
            dtype=options.dtype,
            cache=cache,
            reuse=parse_reuse(reuse),
            folder=folder,
            limits=asdict(LIMITS),
            version=graphrun.__version__,
            state=state,
            warms=warm,
            loras=loras and loras.resolve(),
            log_as_json=log == "json",
            **access_settings,
            **limit_settings,
            **access.webhook_settings(),
            **_devices(options, cluster, cache),
        )
        run(settings, access.host, access.port, say)


def _require_packages() -> None:
    """Raise InputError if packages of the extra ``serve`` are not installed."""
    names = ("fastapi", "httpx", "uvicorn", "prometheus_client", "python_multipart")
    if missing_names := [name for name in names if find_spec(name) is None]:
        raise InputError(f"{', '.join(missing_names)} not installed: {install_command('serve')}")


def _devices(options: PlanOptions, cluster: Path | None, cache: Path) -> dict[str, Any]:
    """Return the `Settings` for the devices and their budgets."""
    from graphrun.devices import Budget, limits_for, resolved_budgets

    if cluster is not None:
        machines = open_cluster(cluster, options)
        if find_spec("ray") is None:
            raise InputError(
                f"--cluster runs on Ray, which is not installed: {install_command('cluster')}"
            )
        return {"budgets": options.cluster_arguments, "hardware": (), "cluster": machines}
    hardware = tuple(cards_for(options, cache, to_run=True))
    options = with_budget(options, hardware[0])
    budgets = {"vram": options.vram, **options.estimate_arguments}
    del budgets["runs"], budgets["until"]
    limits = limits_for(Budget.of(budgets), hardware)
    return {
        "budgets": resolved_budgets(budgets, limits, hardware[0]),
        "hardware": hardware,
    }


def _above_zero(flag: str, text: str) -> float:
    if (seconds := parse_seconds(text, name=flag)) <= 0:
        raise InputError(
            f"{flag} {text}: every request would be too late; type a time above 0, such as 5s"
        )
    return seconds


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
