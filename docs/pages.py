"""Writes the pages and drawings of docs/ that come from the code: ``make docs``.
tests/docs/test_pages.py compares them.

graph-file.md and graphs/graphrun.schema.json from the schema of graph files, plan-text.md from the
parser of plans, cli.md from the commands, errors.md from the classes of errors;
img/architecture.svg from the imports and the layers in pyproject.toml, img/planning.svg from
`STEPS` here, img/timeline.svg from a plan of FLUX.1-dev.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from html import escape
from pathlib import Path
from typing import Any

import grimp
import networkx
import typer

from graphrun import errors
from graphrun.cli import main as cli
from graphrun.cli.options import PlanOptions
from graphrun.cluster.master import Unplaceable
from graphrun.diffusers_.dry_call import ProbeError
from graphrun.graph.ops import OPERATIONS
from graphrun.graph.schema import GraphSpec, schema_text
from graphrun.model import plan
from graphrun.report.chart import timeline_svg
from graphrun.report.memory import parts_of
from graphrun.report.page import planned_slots
from graphrun.report.plan_files import problem_from
from graphrun.report.svg import element, picture
from graphrun.sim.ordering import RaceError
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.solve import solve

DOCS = Path(__file__).parent
ROOT = DOCS.parent
MADE = "<!-- Written by docs/pages.py: `make docs`. Change the code, not this file. -->\n\n"
EXIT_CODES = {
    0: "done",
    1: "over a limit: `--fail-over`, `--fail-peak`, `fit --want`",
    2: "bad input, or failed requests of `--inputs`",
    3: "no plan fits the budgets",
}
EXIT_CODES |= {4: "the run broke its plan; if it ended, its files are written", 130: "interrupted"}
FONT = 'font-family="system-ui, sans-serif"'
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")


def table(head: str, rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table; ``head``: its columns, joined by |."""
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return (
        "\n".join(
            [
                *lines,
                *(
                    f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
                    for row in rows
                ),
            ]
        )
        + "\n"
    )


def markdown(text: str) -> str:
    """A docstring as Markdown: one backtick for code."""
    return " ".join(inspect.cleandoc(text).split()).replace("``", "`")


# -- graph files


def type_of(schema: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """The type of a key in words."""
    if "$ref" in schema:
        return (
            f"[{title(schema['$ref'].rpartition('/')[2])}](#"
            f"{title(schema['$ref'].rpartition('/')[2]).replace(' ', '-')})"
        )
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        kinds = dict.fromkeys(
            type_of(option, defs) for option in schema["anyOf"] if option.get("type") != "null"
        )
        plain = [kind for kind in ("text", "bool", "int", "number") if kind in kinds]
        nested = [kind for kind in kinds if kind not in plain]
        if len(plain) == 4:
            plain, nested = ["value"], list(dict.fromkeys(kind.split()[0] for kind in nested))
        return " or ".join([*plain, *nested])
    match schema.get("type"):
        case "array":
            return f"list of {type_of(schema['items'], defs)}"
        case "object":
            pattern = next(iter(schema.get("patternProperties", {}).values()), None)
            pattern = pattern or schema.get("additionalProperties")
            return (
                f"mapping of {type_of(pattern, defs)}" if isinstance(pattern, dict) else "mapping"
            )
        case None:
            return "anything"
        case kind:
            minimum = f" > {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else ""
            return {"string": "text", "integer": "int", "number": "number", "boolean": "bool"}[
                kind
            ] + minimum


def title(name: str) -> str:
    """``IpAdapterSpec`` as ``ip adapter``."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name.removesuffix("Spec")).lower()


def keys(
    schema: Mapping[str, Any], defs: Mapping[str, Any], sections: dict[tuple[str, str], str]
) -> Iterator[tuple[str, ...]]:
    """The rows of a definition. ``sections``: for a key and its description, where it is."""
    required = schema.get("required", ())
    for key, value in schema["properties"].items():
        default = value.get("default")
        end = (
            " Required."
            if key in required
            else ""
            if default in (None, [], {})
            else f" Default: `{json.dumps(default)}`."
        )
        meaning, name = value["description"], title(schema["title"])
        section = sections.setdefault((key, meaning), name)
        if section != name and len(meaning) > 50:
            meaning = f"As for [{section}](#{section.replace(' ', '-')})."
        yield f"`{key}`", type_of(value, defs), meaning + end


def graph_file() -> str:
    whole = GraphSpec.model_json_schema()
    defs, sections = whole["$defs"], dict[tuple[str, str], str]()
    text = f"""# Graph file

{MADE}A graph is a YAML file. It lists what a run is given (`inputs`), modules with weights \
(`components`), objects without weights
(`parts`), and the `stages`. A stage may use results of others. \
[Write a graph](howto/write-a-graph.md) is a guide.

`graphrun schema` prints this page as a JSON Schema, for completion and checks in an editor. The \
first line of each file
in `graphs/` names it. Unknown keys are refused with their line.

## graph

{table("key | type | meaning", keys(whole, defs, sections))}
"""
    order = (
        "InputSpec",
        "ComponentSpec",
        "CheckpointSpec",
        "PartSpec",
        "PipelineSpec",
        "StageSpec",
        "DirectivesSpec",
        "LoraSpec",
        "IpAdapterSpec",
    )
    assert set(order) == set(defs)
    for name in order:
        definition = defs[name]
        text += (
            f"## {title(name)}\n\n{markdown(definition['description'])}"
            f"\n\n{table('key | type | meaning', keys(definition, defs, sections))}\n"
        )
    return (
        text
        + f"""## ops

Arguments in bold are required. `call` and `block` also take and return what the pipeline's class \
does. `depth` needs a component
`depth_estimator` and a part `depth_processor` ([example](howto/adapters.md#controlnet)).

{table("op | arguments | outputs | options", ops())}
An option is another way to run a stage. `slicing` (a VAE call per picture) needs no `--allow`;
on a card its rounding may differ.
"""
    )


def ops() -> Iterator[tuple[str, ...]]:
    for name, operation in OPERATIONS.items():
        arguments = [f"**{key}** {kind}" for key, kind in operation.required.items()] + [
            f"{key} {kind}" for key, kind in operation.optional.items()
        ]
        yield (
            f"`{name}`",
            ", ".join(arguments),
            ", ".join(operation.outputs),
            ", ".join(operation.options) or "-",
        )


# -- plans


def plan_text() -> str:
    actions = (
        (f"`{form}`", markdown(kind.__doc__ or "")) for kind, _, form in plan.ACTION_LINES.values()
    )
    choices = {
        "finds": "On the device when the first slot begins.",
        "leaves": "On the device when a run of a session ends.",
        "variant": "Precision, backing store and computing device of a component that has several.",
        "split": "Consecutive blocks of a component that compute on a secondary device, as the "
        "groups `NAME@1`.",
        "copy": "A copy of a component on a secondary device, `NAME@1`, which makes the first call "
        "of each step.",
        "option": "The option of a stage.",
        "order": "The order of the stages, if it is not the graph's.",
    }
    rows = ((f"`{plan.CHOICE_LINES[name][1]}`", meaning) for name, meaning in choices.items())
    return f"""# Plan text

{MADE}A plan is a text: what is done, and when. A saved plan has it, line by line, under \
`actions`. `graphrun check plan.json`
computes its peaks and seconds, and refuses a text that breaks a rule. [Read a \
plan](tutorial/read-a-plan.md) explains an example.

```text
plan 5f0c1de2a9b34c77                          checksum of graph, card, budgets
variant transformer nf4 pinned device
slot denoise/0:transformer steady x27          the 27 calls after the first
  stream transformer keep transformer_blocks[0,8,16] ring buffer 680 MiB
  load vae all from pinned
  run
slot end
```

## Grammar

```text
plan     = "plan" DIGEST, {{ choice }}, {{ slot }}, [ "again", {{ slot }} ]
choice   = {" | ".join(choices)}
slot     = "slot" PHASE ( "load" | "first" | "steady" ) [ "x" CALLS ] | "slot" "end", {{ action }}
action   = {" | ".join(plan.ACTION_LINES)}
BLOCKS   = "all" | "none" | GROUP "[" INDICES "]" {{ GROUP "[" INDICES "]" }}
INDICES  = N | N "-" N, joined by ","
```

One line each. `#` starts a comment. Blank lines and indentation are ignored. `again` comes before \
the slots of the later runs of a
session. Each slot waits for the copies of the one before it.

## Choices

{table("line | meaning", rows)}
## Actions

{table("line | meaning", actions)}"""


# -- commands


def option_list(rows: Iterable[tuple[str, str]]) -> str:
    """A Markdown list of options."""
    return "".join(f"- {names}: {meaning}\n" for names, meaning in rows)


def commands() -> str:
    whole = typer.main.get_command(cli.app)
    rows = {path: list(options(command)) for path, command in listed(whole, ())}
    counts = Counter(row for command_rows in rows.values() for row in command_rows)
    flags = {f"--{field.name.strip('_').replace('_', '-')}" for field in fields(PlanOptions)}
    planning = [row for row in rows["plan",] if flag(row) in flags]
    shared = [row for row, count in counts.items() if count > 2 and row not in planning]
    text = f"""# Commands

{MADE}`graphrun COMMAND --help` prints the same. [Exit codes](errors.md). GRAPH is a graph file, \
the name of a graph (`graphrun list`), or a plan saved with `-o`.

Options before the command:

{option_list(options(whole))}
## Shared options

The planning options:

{option_list(planning)}
Others:

{option_list(shared)}
"""
    for path, command in listed(whole, ()):
        arguments = " ".join(
            argument(parameter)
            for parameter in command.params
            if parameter.param_type_name == "argument"
        )
        usage = f"graphrun {' '.join(path)} [OPTIONS] {arguments}".rstrip()
        text += f"## graphrun {' '.join(path)}\n\n`{usage}`\n\n"
        text += f"{markdown(command.help or '')}\n\n"
        takes_all = set(planning) <= set(rows[path])
        names = ["all planning options"] if takes_all else []
        names += [
            f"`{flag(row)}`"
            for row in rows[path]
            if row in shared or (row in planning and not takes_all)
        ]
        if names:
            text += f"Shared options: {', '.join(names)}.\n\n"
        if specific := [row for row in rows[path] if row not in (*planning, *shared)]:
            text += option_list(specific) + "\n"
    # a page that a help text names becomes a link
    text = re.sub(r"docs/((?:\w+/)*)(\w+)\.md", r"[\2](\1\2.md)", text)
    return text.rstrip() + "\n"


def listed(group: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from listed(command, (*path, name))
        else:
            yield (*path, name), command


def argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper()
    return name if parameter.required else f"[{name}]"


def flag(row: tuple[str, str]) -> str:
    """The first option that a row of `options` is about."""
    return row[0].split(" ")[0].strip("`,")


def options(command: Any) -> Iterator[tuple[str, str]]:
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            metavar = f" {parameter.metavar}" if parameter.metavar else ""
            names = ", ".join(
                f"`{name}{metavar}`" for name in [*parameter.opts, *parameter.secondary_opts]
            )
            default = (
                parameter.default
                if isinstance(parameter.default, (str, int, float))
                and not isinstance(parameter.default, bool)
                else None
            )
            yield (
                names,
                f"{parameter.help or ''}"
                f"{' Required.' if parameter.required else ''}"
                f"{f' Default: `{default}`.' if default not in (None, '') else ''}",
            )


# -- errors


def errors_page() -> str:
    public_errors = [
        error_class
        for _, error_class in inspect.getmembers(errors, inspect.isclass)
        if issubclass(error_class, errors.GraphrunError)
    ]
    error_classes = [*public_errors, Infeasible, ProbeError, RaceError, Unplaceable]
    rows = (
        (
            f"`{error_class.__name__}`",
            f"`{error_class.__mro__[1].__name__}`",
            str(error_class.exit_code),
            markdown((error_class.__doc__ or "").partition("\n\n")[0]),
        )
        for error_class in sorted(
            error_classes, key=lambda error_class: (len(error_class.__mro__), error_class.__name__)
        )
    )
    assert {error.exit_code for error in public_errors} | {Infeasible.exit_code} <= set(EXIT_CODES)
    return f"""# Errors and exit codes

{MADE}graphrun's errors are `graphrun.GraphrunError`s. The message says what is wrong, where \
(`file:line`), and what to type. The command line prints
it without a traceback; a traceback is a bug. Import the classes from `graphrun`.

{table("exit code | meaning", ((str(code), meaning) for code, meaning in EXIT_CODES.items()))}
{table("class | is a | exit code | raised when", rows)}
With `--json`, exit code 3 also prints the reasons as data ([keys](json.md#nothing-fits)).
"""


# -- drawings


def boxes(rows: list[list[str]], width: int, gap: int) -> dict[str, tuple[float, float, float]]:
    """Centre x, top y and width of a box for each name, row by row."""
    places = {}
    for number, row in enumerate(rows):
        widths = [max(90.0, 9.0 * len(name) + 24) for name in row]
        # next to a passing arrow
        x = (width - sum(widths) - 24 * (len(row) - 1)) / 2 - (
            120 if len(row) == 1 and number % 2 else 0
        )
        for name, box_width in zip(row, widths, strict=True):
            places[name] = (x + box_width / 2, 16.0 + number * gap, box_width)
            x += box_width + 24
    return places


def drawn(
    places: Mapping[str, tuple[float, float, float]],
    edges: list[tuple[str, str]],
    width: int,
    height: int,
    label: str,
) -> str:
    """Boxes, and an arrow down from the first to the second of each edge."""
    head = element("path", d="M0 0L8 4L0 8Z", fill="#789")
    parts = [
        element(
            "defs",
            element(
                "marker",
                head,
                id="head",
                orient="auto",
                markerWidth=8,
                markerHeight=8,
                refX=7,
                refY=4,
            ),
        )
    ]
    for upper, lower in edges:
        (x, top, _), (end_x, bottom, _) = places[upper], places[lower]
        start, end = top + 30, bottom - 2
        bend = (start + end) / 2
        curve = (
            f"M{x:.0f} {start:.0f}C{x:.0f} {bend:.0f} {end_x:.0f} {bend:.0f} {end_x:.0f} {end:.0f}"
        )
        parts.append(
            element(
                "path",
                d=curve,
                fill="none",
                stroke="#789",
                stroke_width=1.2,
                marker_end="url(#head)",
            )
        )
    for name, (x, top, box_width) in places.items():
        parts.append(
            element(
                "rect",
                x=x - box_width / 2,
                y=top,
                width=box_width,
                height=30.0,
                rx=6,
                fill="#eef3f8",
                stroke="#345",
            )
        )
        parts.append(
            element(
                "text",
                escape(name),
                x=x,
                y=top + 20,
                text_anchor="middle",
                fill="#123",
                font_size=14,
            )
        )
    whole = element("rect", x=0, y=0, width=width, height=height, fill="#fff")
    return picture(
        [whole, *parts],
        f"0 0 {width} {height}",
        width=width,
        role="img",
        aria_label=label,
        font_family="system-ui, sans-serif",
    )


def layers() -> list[list[str]]:
    """The layers of pyproject.toml, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (rows,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip().removeprefix("graphrun.") for name in row.split("|")] for row in rows]


def imports() -> networkx.DiGraph:
    """The packages and modules of graphrun, with an edge for each that another imports, also inside
    functions."""
    graph = grimp.build_graph("graphrun", exclude_type_checking_imports=False, cache_dir=None)
    names = sorted(graph.find_children("graphrun"))
    for name in names:
        graph.squash_module(name)
    module_graph = networkx.DiGraph()
    for name in names:
        for imported_name in sorted(
            graph.find_modules_directly_imported_by(name) & set(names) - {name}
        ):
            module_graph.add_edge(
                name.removeprefix("graphrun."), imported_name.removeprefix("graphrun.")
            )
    return module_graph


def architecture() -> str:
    rows, import_graph = layers(), imports()
    names = {name for row in rows for name in row}
    edges = networkx.transitive_reduction(import_graph.subgraph(names)).edges
    gap = 74
    return drawn(
        boxes(rows, 760, gap),
        sorted(edges),
        760,
        30 + gap * len(rows),
        "Packages of graphrun, and which imports which",
    )


STEPS = {
    (
        "graph file, or a live pipeline",
        "dry run",
    ): "the pipeline's own code on a device without memory",
    ("dry run", "problem"): "bytes and seconds of every block, value and call",
    ("problem", "solver"): "an integer program for the budgets",
    ("solver", "plan"): "what is on the device in every slot",
    ("plan", "check and simulate"): "every rule, in integers; shares no code with the solver",
    ("check and simulate", "run"): "exactly the plan, measured",
}


def planning() -> str:
    """From a graph to a run; each arrow is labelled with what is known then."""
    names = list(dict.fromkeys(name for edge in STEPS for name in edge))
    height = 40 + 72 * len(names)
    places = {name: (150.0, 16.0 + 72 * number, 240.0) for number, name in enumerate(names)}
    text = [
        element("text", escape(caption), x=166, y=places[upper][1] + 54, fill="#456", font_size=13)
        for (upper, _), caption in STEPS.items()
    ]
    whole = drawn(places, list(STEPS), 560, height, "From a graph to a run")
    return whole.replace("</svg>", "\n".join([*text, "</svg>"]))


def timeline() -> str:
    """Copies, compute and memory of FLUX.1-dev within 8 GiB on an RTX 4090, with all weights in
    page-locked RAM."""
    problem = problem_from(
        json.loads((ROOT / "tests" / "solve" / "problems" / "flux-dev.json").read_text())
    )
    solution = solve(replace(problem, budget_bytes=8 * 2**30))
    simulation, applied = solution.simulation, solution.chosen
    colours = {component.name: number for number, component in enumerate(applied.components)}
    parts = {
        f"{report.phase} {report.part}".strip(): (report.compute_seconds, slot_parts)
        for report, slot_parts in zip(simulation.slots, parts_of(solution), strict=True)
    }
    whole = timeline_svg(
        simulation.events,
        planned_slots(simulation.slots),
        parts,
        applied.effective_bytes,
        colours,
        "FLUX.1-dev, 8 GiB",
    )
    style = (
        "text{font:13px system-ui,sans-serif;fill:#222} .tick{fill:#666} .lane{fill:#f3f3f3} "
        ".waits{fill:url(#waits)} "
    )
    style += (
        ".hatching{stroke:#999;fill:none} .activation{fill:#9db4cc} .values,.other{fill:#666} "
        ".ring_buffer{opacity:.5} "
    )
    style += ".stream{opacity:.65} "
    style += ".budget{stroke:#c0392b;stroke-width:1.5;stroke-dasharray:6 4;fill:none} "
    style += " ".join(f".c{number}{{fill:{colour}}}" for number, colour in enumerate(COLOURS))
    for number, name in enumerate(colours):
        whole = whole.replace(
            "</svg>",
            element("rect", x=90 + 170 * number, y=-16, width=10, height=10, class_=f"c{number}")
            + "</svg>",
        )
        whole = whole.replace(
            "</svg>", element("text", name, x=106 + 170 * number, y=-6) + "</svg>"
        )
    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', whole)
    assert box
    whole = whole.replace(
        box[0], f'xmlns="http://www.w3.org/2000/svg" viewBox="0 -26 {box[1]} {int(box[2]) + 30}"', 1
    )
    return whole.replace(">", f"><style>{style}</style>", 1) + "\n"


PAGES = {
    "../graphs/graphrun.schema.json": schema_text,
    "graph-file.md": graph_file,
    "plan-text.md": plan_text,
    "cli.md": commands,
    "errors.md": errors_page,
}
DRAWINGS = {
    "img/architecture.svg": architecture,
    "img/planning.svg": planning,
    "img/timeline.svg": timeline,
}


def main() -> None:
    """Writes what differs."""
    for name, make in (PAGES | DRAWINGS).items():
        text = make()
        if not (path := DOCS / name).is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
