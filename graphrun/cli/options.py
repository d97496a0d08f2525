"""The options of the commands that plan, declared once: budgets, hardware, inputs, directives.

A command written as ``@shared() def plan(graph: GraphFile, asked: Asked)`` gets an option for each
field of `Asked`.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer

from graphrun.errors import InputError

Names = list[str] | None
HardwareName = Annotated[
    str | None,
    typer.Option(
        help="A profile or a built-in device; default: the card found, else rtx4090.",
        show_default=False,
    ),
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        help="cuda or sim, or cuda:0,cuda:1; default: the hardware's.", show_default=False
    ),
]
Sets = Annotated[
    Names,
    typer.Option(
        "--set", help="An input of the graph: name=value. Repeatable.", show_default=False
    ),
]
Outputs = Annotated[
    Names,
    typer.Option(
        "--output",
        "-o",
        help="The output file; or name=file, for one output. With --inputs a folder, or a pattern: out/{line:04d}-{seed}.png. "
        "Default out/<graph>.png, then out/<graph>-2.png.",
        show_default=False,
    ),
]
Reuse = Annotated[
    str,
    typer.Option(
        "--reuse",
        help="Cached outputs of earlier runs to use: encoded (of encode_prompt), all (latents too), none.",
    ),
]
Trust = Annotated[
    Names,
    typer.Option(
        "--trust-package",
        help="A package of which the graph, or what is imported, may name any class, which runs its code. Repeatable.",
        metavar="NAME",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Overwrite output files that exist.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="All figures.")]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache", help="Neither read nor write the cache of dry runs, plans and outputs."
    ),
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The values of the shared options, as typed."""

    vram: Annotated[
        str | None,
        typer.Option(
            help="VRAM budget, as nvidia-smi would show it: 8G, 7.5GiB, 50%; 24G,12G for two cards; auto: what is free, less 5 %.",
            show_default=False,
        ),
    ] = None
    ram: Annotated[
        str, typer.Option(help="Host RAM budget; auto: what this machine, or its cgroup, has left.")
    ] = "auto"
    pinned: Annotated[
        str | None,
        typer.Option(help="Part of the RAM that may be page-locked.", show_default=False),
    ] = None
    disk: Annotated[
        str | None, typer.Option(help="Bytes that may be written to disk.", show_default=False)
    ] = None
    hardware: HardwareName = None
    device: DeviceName = None
    set_: Sets = None
    runs: Annotated[
        int,
        typer.Option(
            help="Plan a session of this many runs: a cold first one, then warm ones.", min=1
        ),
    ] = 1
    allow: Annotated[
        Names,
        typer.Option(
            help="What may change the output: precision, int8, nf4, cpu, tiling, split, compile. Repeatable.",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        Names,
        typer.Option(
            help="A component that stays from its first use to the end. Repeatable.",
            show_default=False,
        ),
    ] = None
    exclude: Annotated[
        Names,
        typer.Option(
            help="A component that is always streamed, with no block kept. Repeatable.",
            show_default=False,
        ),
    ] = None
    pin: Annotated[
        Names,
        typer.Option(
            help="A component whose master copy is page-locked. Repeatable.", show_default=False
        ),
    ] = None
    reserve: Annotated[
        str | None,
        typer.Option(help="Part of the VRAM budget left to other programs.", show_default=False),
    ] = None
    until: Annotated[
        str | None,
        typer.Option(help="A stage: plan only what its outputs need.", show_default=False),
    ] = None
    trust_package: Trust = None
    source: Annotated[
        str | None,
        typer.Option(
            help="A folder, file or repository (owner/name@revision) in place of the graph's own source.",
            show_default=False,
        ),
    ] = None
    no_cache: NoCache = False

    @property
    def estimate_arguments(self) -> dict[str, Any]:
        """The arguments of `graphrun.estimate` besides graph, VRAM budget, hardware and inputs."""
        named = {
            name: tuple(getattr(self, name) or ()) for name in ("allow", "keep", "exclude", "pin")
        }
        return {
            name: getattr(self, name)
            for name in ("ram", "pinned", "disk", "runs", "reserve", "until")
        } | named

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs set with ``--set name=value``. Raises InputError for another form."""
        return dict(pair("--set", text, may_be_empty=True) for text in self.set_ or [])

    @property
    def flags(self) -> str:
        """The options that were set, as they are typed."""
        words = []
        for name, default in _DEFAULTS.items():
            if (value := getattr(self, name)) != default:
                flag = f"--{name.strip('_').replace('_', '-')}"
                words += (
                    [flag]
                    if value is True
                    else [
                        w
                        for each in (value if isinstance(value, list) else [value])
                        for w in (flag, str(each))
                    ]
                )
        return shlex.join(words)

    def refuse_for_plan(self, path: Any, *, to_run: bool) -> None:
        """Raises InputError where an option is set that the plan saved at ``path`` has fixed
        already. ``to_run``: what the plan may choose is allowed again."""
        free = ("set_", "no_cache", "trust_package", "source", *(["allow"] if to_run else []))
        own = [field.name for field in fields(self) if field.name not in free]
        if set_names := [name for name in own if getattr(self, name) != _DEFAULTS[name]]:
            flags = ", ".join(f"--{name}" for name in set_names)
            raise InputError(
                f"{path} is a plan: it has its own budgets, hardware, device and directives; leave {flags} out"
            )


def retyped(arguments: Sequence[str], options: Sequence[str]) -> str:
    """The command line of ``arguments`` with ``options``, pairs of an option and its value. They
    replace the budgets and the inputs of the same name; other options may be repeated, and are
    added."""
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
    return shlex.join([*words, *(word for each in pairs for word in each)])


def pair(option: str, text: str, *, may_be_empty: bool = False) -> tuple[str, str]:
    """The name and the value in ``text``, name=value, given with ``option``. Raises InputError for
    another form."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not (value or may_be_empty):
        raise InputError(f"{option} {text!r} is not name=value")
    return name.strip(), value


_DEFAULTS = {field.name: field.default for field in fields(Asked)}
_OPTIONS = [
    inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=option
    )
    for name, option in get_type_hints(Asked, include_extras=True).items()
]


def shared(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each of the fields ``names`` of `Asked` (none: for all) in
    place of the parameter ``asked``.

    The options are in the signature that typer reads, after the command's arguments.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            p.replace(kind=p.KEYWORD_ONLY, annotation=hints[n])
            for n, p in inspect.signature(command).parameters.items()
        ]
        parameters = [p for p in own if p.default is p.empty and p.name != "asked"]
        parameters += [of for of in _OPTIONS if not names or of.name in names]
        parameters += [p for p in own if p.default is not p.empty]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            asked = Asked(**{name: values.pop(name) for name in _DEFAULTS if name in values})
            command(asked=asked, **values)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate
