"""The options that commands for planning share: budgets, hardware, inputs, directives.

A command written as ``@shared() def plan(graph: GraphFile, options: PlanOptions)`` gets an option
for each field of `PlanOptions`.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, get_type_hints

import typer

from graphrun.device_kinds import built_in
from graphrun.errors import InputError

NameList = list[str] | None
HardwareName = Annotated[
    str | None,
    typer.Option(
        help="Card, CPU or saved profile to plan for. Default: the card here, else rtx4090.",
        metavar="NAME",
        show_default=False,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(kind.name for kind in built_in())}, another PyTorch backend, or two "
        "cards: cuda:0,cuda:1. Default: the hardware's.",
        metavar="NAME",
        show_default=False,
    ),
]
Sets = Annotated[
    NameList,
    typer.Option(
        "--set",
        help="Set an input of the graph. Repeatable.",
        metavar="NAME=VALUE",
        show_default=False,
    ),
]
Outputs = Annotated[
    NameList,
    typer.Option(
        "--output",
        "-o",
        help="Output file; NAME=FILE for one of several outputs. With --inputs: a folder, or a "
        "pattern such as out/{line:04d}-{seed}.png. Default: out/<graph>.png, then "
        "out/<graph>-2.png.",
        metavar="FILE",
        show_default=False,
    ),
]
ReuseOption = Annotated[
    str,
    typer.Option(
        "--reuse",
        help="Cached stage outputs to use: encoded (prompt embeddings), all (latents too), none.",
        metavar="WHICH",
    ),
]
Trust = Annotated[
    NameList,
    typer.Option(
        "--trust-package",
        help="Allow classes of this Python package, whose code then runs. Repeatable.",
        metavar="NAME",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Overwrite existing output files.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show all figures.")]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Do not use the cache of dry runs, plans and stage outputs."),
]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The values of the shared options, as typed."""

    vram: Annotated[
        str | None,
        typer.Option(
            help="VRAM budget, counted as nvidia-smi does: 8G, 7.5GiB, 50%; 24G,12G for two "
            "cards; auto: 95 % of what is free.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None
    ram: Annotated[
        str,
        typer.Option(
            help="RAM budget; auto: what this machine or its cgroup has left.",
            metavar="SIZE",
        ),
    ] = "auto"
    memory: Annotated[
        str | None,
        typer.Option(
            help="With --device cpu, in place of --vram and --ram: budget of the whole process; "
            "auto: 95 % of what is free.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None
    pinned: Annotated[
        str | None,
        typer.Option(
            help="Limit of page-locked RAM, within --ram.", metavar="SIZE", show_default=False
        ),
    ] = None
    disk: Annotated[
        str | None,
        typer.Option(help="Limit of what is written to disk.", metavar="SIZE", show_default=False),
    ] = None
    hardware: HardwareName = None
    device: DeviceName = None
    set_: Sets = None
    runs: Annotated[
        int,
        typer.Option(
            help="Plan this many runs in a row: a cold first one, then warm ones.",
            metavar="N",
            min=1,
        ),
    ] = 1
    allow: Annotated[
        NameList,
        typer.Option(
            help="Allow what may change the output: 4bit, 8bit, a format (nf4, int8, Q4_K_S), "
            "precision (any format), cpu, tiling, split, compile. Repeatable.",
            metavar="WHAT",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        NameList,
        typer.Option(
            help="Keep this component on the device from its first use to the end. Repeatable.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None
    exclude: Annotated[
        NameList,
        typer.Option(
            help="Always stream this component, with no block resident. Repeatable.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None
    pin: Annotated[
        NameList,
        typer.Option(
            help="Page-lock the host copy of this component. Repeatable.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None
    reserve: Annotated[
        str | None,
        typer.Option(
            help="Part of the budget to leave to other programs.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None
    until: Annotated[
        str | None,
        typer.Option(
            help="Stop after this stage; plan only what it needs.",
            metavar="STAGE",
            show_default=False,
        ),
    ] = None
    trust_package: Trust = None
    source: Annotated[
        str | None,
        typer.Option(
            help="Folder, file or repository (owner/name@revision) to read the weights from.",
            metavar="SOURCE",
            show_default=False,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16 for components with a 16-bit dtype; graph: as in "
            "the graph file. Default: graph, or float32 on a CPU where 16 bits are slower.",
            metavar="DTYPE",
            show_default=False,
        ),
    ] = None
    no_cache: NoCache = False

    @property
    def estimate_arguments(self) -> dict[str, Any]:
        """The arguments of `graphrun.estimate`, except graph, VRAM budget, hardware and inputs."""
        name_lists = {
            name: tuple(getattr(self, name) or ()) for name in ("allow", "keep", "exclude", "pin")
        }
        return {
            name: getattr(self, name)
            for name in ("ram", "memory", "pinned", "disk", "runs", "reserve", "until")
        } | name_lists

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs set with ``--set name=value``. Raises InputError for another form."""
        return dict(pair("--set", text, may_be_empty=True) for text in self.set_ or [])

    @property
    def flags(self) -> str:
        """The options that differ from their defaults, as they are typed."""
        words = []
        for name, default in _DEFAULTS.items():
            if (value := getattr(self, name)) != default:
                flag = f"--{name.strip('_').replace('_', '-')}"
                words += (
                    [flag]
                    if value is True
                    else [
                        w
                        for item in (value if isinstance(value, list) else [value])
                        for w in (flag, str(item))
                    ]
                )
        return shlex.join(words)

    @property
    def flags_with_plan(self) -> str:
        """The `flags` that the command for a saved plan also takes."""
        return replace(
            PlanOptions(), **{name: getattr(self, name) for name in _FREE_WITH_PLAN}
        ).flags

    def refuse_for_plan(self, path: Any, *, to_run: bool) -> None:
        """Raise InputError if an option is set that the plan at ``path`` has already fixed.
        ``to_run``: --allow may be set, to confirm what the plan may choose."""
        free_names = (*_FREE_WITH_PLAN, *(["allow"] if to_run else []))
        fixed_names = [field.name for field in fields(self) if field.name not in free_names]
        if set_names := [name for name in fixed_names if getattr(self, name) != _DEFAULTS[name]]:
            flags = ", ".join(f"--{name}" for name in set_names)
            raise InputError(
                f"{path} is a plan: it has its own budgets, hardware, device and "
                f"directives; leave {flags} out"
            )


def with_typed_budget(options: PlanOptions, option: str, text: str) -> PlanOptions:
    """Return ``options`` with the budget ``text`` for ``--vram`` or ``--memory``."""
    return replace(options, memory=text) if option == "--memory" else replace(options, vram=text)


def merge_options(arguments: Sequence[str], options: Sequence[str]) -> str:
    """Return the command line of ``arguments`` with ``options``, alternating names and values.

    ``options`` replace budgets, and inputs of the same name; --allow, which may be repeated, is
    added.
    """
    words, pairs = list(arguments), list(zip(options[::2], options[1::2], strict=True))
    for option, value in pairs:
        start = f"{value.partition('=')[0]}=" if option == "--set" else ""
        if option == "--allow":
            continue
        for number in reversed(range(len(words))):
            if words[number] == option and words[number + 1].startswith(start):
                del words[number : number + 2]
            elif words[number].startswith(f"{option}={start}"):
                del words[number]
    return shlex.join([*words, *(word for option_pair in pairs for word in option_pair)])


def pair(option: str, text: str, *, may_be_empty: bool = False) -> tuple[str, str]:
    """Return the name and the value in ``text``, name=value, typed after ``option``. Raises
    InputError for another form."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not (value or may_be_empty):
        raise InputError(f"{option} {text!r} is not name=value")
    return name.strip(), value


# options that a saved plan does not fix
_FREE_WITH_PLAN = ("set_", "no_cache", "trust_package", "source")
_DEFAULTS = {field.name: field.default for field in fields(PlanOptions)}
_OPTIONS = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=option
    )
    for name, option in get_type_hints(PlanOptions, include_extras=True).items()
]


def shared(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter ``options`` of a command by the options ``names`` (default: all) of
    `PlanOptions`, in the signature that typer reads, after the command's arguments."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        command_parameters = [
            p.replace(kind=p.KEYWORD_ONLY, annotation=hints[n])
            for n, p in inspect.signature(command).parameters.items()
        ]
        parameters = [p for p in command_parameters if p.default is p.empty and p.name != "options"]
        parameters += [option for option in _OPTIONS if not names or option.name in names]
        parameters += [p for p in command_parameters if p.default is not p.empty]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            options = PlanOptions(
                **{name: values.pop(name) for name in _DEFAULTS if name in values}
            )
            command(options=options, **values)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate
