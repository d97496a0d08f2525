"""The options that commands for planning share: budgets, hardware, inputs, directives.

A command written as ``@shared() def plan(graph: GraphFile, options: PlanOptions)`` gets an option
for each field of `PlanOptions`.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from graphrun.device_kinds import built_in
from graphrun.errors import InputError
from graphrun.many import CLUSTER_OPTIONS


def option(text: str, metavar: str, *flags: str, **settings: Any) -> Any:
    """Return an option with the help ``text``, which does not show its default."""
    return typer.Option(*flags, help=text, metavar=metavar, show_default=False, **settings)


NameList = list[str] | None
HardwareName = Annotated[
    str | None,
    option("Card, CPU or saved profile to plan for. Default: the card here, else rtx4090.", "NAME"),
]
DeviceName = Annotated[
    str | None,
    option(
        f"{', '.join(kind.name for kind in built_in())}, another PyTorch backend, or two "
        "cards: cuda:0,cuda:1. Default: the hardware's.",
        "NAME",
    ),
]
Sets = Annotated[
    NameList,
    option("Set an input of the graph. Repeatable.", "NAME=VALUE", "--set"),
]
Outputs = Annotated[
    NameList,
    option(
        "Output file; NAME=FILE for one of several outputs. With --inputs: a folder, or a "
        "pattern such as out/{line:04d}-{seed}.png. Default: out/<graph>.png, then "
        "out/<graph>-2.png.",
        "FILE",
        "--output",
        "-o",
    ),
]
PlanFile = Annotated[Path | None, option("Save the plan to this file.", "FILE", "-o")]
TextFile = Annotated[Path | None, option("Output file. Default: stdout.", "FILE", "-o")]
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
    option(
        "Allow classes of this Python package, whose code then runs. Repeatable.",
        "NAME",
        "--trust-package",
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
        option(
            "VRAM budget, counted as nvidia-smi does: 8G, 7.5GiB, 50%; 24G,12G for two "
            "cards; auto: 95 % of what is free. Default: auto, with --hardware all of the card.",
            "SIZE",
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
        option(
            "On a CPU or shared memory, in place of --vram and --ram: budget of the whole process; "
            "auto: 95 % of what is free.",
            "SIZE",
        ),
    ] = None
    pinned: Annotated[
        str | None,
        option("Limit of page-locked RAM, within --ram.", "SIZE"),
    ] = None
    disk: Annotated[
        str | None,
        option("Limit of what is written to disk.", "SIZE"),
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
        option(
            "Allow what may change the output: 4bit, 5bit, 6bit, 8bit, a format (nf4, Q4_K_S), "
            "precision (any format), cpu, tiling, split, compile. Repeatable.",
            "WHAT",
        ),
    ] = None
    keep: Annotated[
        NameList,
        option(
            "Keep this component on the device from its first use to the end. Repeatable.", "NAME"
        ),
    ] = None
    exclude: Annotated[
        NameList,
        option("Always stream this component, with no block resident. Repeatable.", "NAME"),
    ] = None
    pin: Annotated[
        NameList,
        option("Page-lock the host copy of this component. Repeatable.", "NAME"),
    ] = None
    reserve: Annotated[
        str | None,
        option("Part of the budget to leave to other programs.", "SIZE"),
    ] = None
    until: Annotated[
        str | None,
        option("Stop after this stage; plan only what it needs.", "STAGE"),
    ] = None
    trust_package: Trust = None
    source: Annotated[
        str | None,
        option(
            "Folder, file, repository (owner/name@revision) or URL (s3://bucket/flux) to read the "
            "weights from.",
            "SOURCE",
        ),
    ] = None
    absent: Annotated[
        NameList,
        option(
            "Leave this component out: text_encoder_3. Repeatable.",
            "NAME",
            "--without",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        option(
            "float32, bfloat16 or float16 for components with a 16-bit dtype; graph: as in "
            "the graph file. Default: graph, or float32 on a CPU where 16 bits are slower.",
            "DTYPE",
        ),
    ] = None
    no_cache: NoCache = False

    @property
    def estimate_arguments(self) -> dict[str, Any]:
        """The arguments of `graphrun.estimate`, except graph, hardware and inputs."""
        name_lists = {
            name: tuple(getattr(self, name) or ()) for name in ("allow", "keep", "exclude", "pin")
        }
        return {
            name: getattr(self, name)
            for name in ("vram", "ram", "memory", "pinned", "disk", "runs", "reserve", "until")
        } | name_lists

    @property
    def cluster_arguments(self) -> dict[str, Any]:
        """The `estimate_arguments` that a cluster file does not replace, except ``until``."""
        return {
            name: value
            for name, value in self.estimate_arguments.items()
            if name not in (*CLUSTER_OPTIONS, "until")
        }

    def refuse_for_cluster(self, path: Path) -> None:
        """Raise InputError if an option is set that the cluster file ``path`` replaces."""
        if flags := self._set_flags((*CLUSTER_OPTIONS, "device")):
            raise InputError(f"{path} has the budgets of hosts and devices: leave out {flags}")

    def _set_flags(self, names: Iterable[str]) -> str:
        """Return the flags of the options among ``names`` that are set."""
        return ", ".join(_flag(name) for name in names if getattr(self, name) != _DEFAULTS[name])

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
                flag = _flag(name)
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

    def refuse_for_plan(self, path: Path, *, to_run: bool) -> None:
        """Raise InputError if an option is set that the plan at ``path`` has already fixed.
        ``to_run``: --allow may be set, to confirm what the plan may choose."""
        free_names = (*_FREE_WITH_PLAN, *(["allow"] if to_run else []))
        fixed_names = [field.name for field in fields(self) if field.name not in free_names]
        if flags := self._set_flags(fixed_names):
            raise InputError(
                f"{path} is a plan: it has its own budgets, hardware, device and "
                f"directives; leave {flags} out"
            )


def _flag(name: str) -> str:
    """Return the flag of the option ``name``, a field of `PlanOptions`."""
    words = "without" if name == "absent" else name.strip("_").replace("_", "-")
    return f"--{words}"


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
        raise InputError(f"{option} {text!r} is not NAME=VALUE, such as height=512")
    return name.strip(), value


# options that a saved plan does not fix
_FREE_WITH_PLAN = ("set_", "no_cache", "trust_package", "source")
_DEFAULTS = {field.name: field.default for field in fields(PlanOptions)}


def shared(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameters of a command that are records of options, such as `PlanOptions`, by an
    option for each field, in the signature that typer reads, after the command's arguments.

    ``names``: the only fields of `PlanOptions` that become options; default: all.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        arguments, plain = list[inspect.Parameter](), list[inspect.Parameter]()
        records = dict[str, tuple[Any, list[inspect.Parameter]]]()
        for parameter in _parameters(command):
            if is_dataclass(record := parameter.annotation):
                limited = bool(names) and record is PlanOptions
                options = [p for p in _parameters(record) if not limited or p.name in names]
                records[parameter.name] = record, options
            else:
                (arguments if parameter.default is parameter.empty else plain).append(parameter)
        parameters = [*arguments, *(p for _, options in records.values() for p in options), *plain]

        @functools.wraps(command)
        def called(**values: Any) -> None:
            for name, (record, options) in records.items():
                values[name] = record(
                    **{option.name: values.pop(option.name) for option in options}
                )
            command(**values)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def _parameters(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function or a class, as keywords."""
    return [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function, eval_str=True).parameters.values()
    ]
