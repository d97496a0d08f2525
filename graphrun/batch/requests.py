"""Read lists of requests (one set of inputs each) from files or from Python.

prompts.jsonl   {"prompt": "a lighthouse", "seed": 3}
                one object per line; a plain string is the prompt
prompts.csv     prompt,seed
                a header, then one row per request; an empty cell is the default
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.limits import require
from graphrun.reading import parse_json, read_bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One set of inputs.

    ``number``: its line in the file, or its position in the list, from 1. ``error``: why it cannot
    run; empty if it can. ``location``: the file and line, or ``request N``, for messages.
    """

    number: int
    inputs: Mapping[str, Any]
    error: str = ""
    location: str = ""


def read_requests(path: Path) -> list[Request]:
    """Return the requests in the file ``path`` (``.csv``, else JSON lines). Broken ones have an
    ``error``.

    Raises InputError if the file cannot be read or has no request.
    """
    data = read_bytes(path, limit="prompts_bytes")
    if not (requests := list(_rows(data) if path.suffix.lower() == ".csv" else _lines(data))):
        raise InputError(
            f"{path}: has no inputs; write one JSON object per line, "
            'such as {"prompt": "a lighthouse"}'
        )
    require("requests", len(requests), f"it has {len(requests):,} requests", str(path))
    return [replace(request, location=f"{path}:{request.number}") for request in requests]


def requests_from(
    inputs: str | Mapping[str, Any] | Iterable[Mapping[str, Any] | str | Request],
) -> list[Request]:
    """Return requests from Python values: each a mapping of inputs, a prompt, or a `Request`, which
    is returned unchanged. A single mapping or prompt is one request."""
    return [
        entry
        if isinstance(entry, Request)
        else replace(_request(number, entry), location=f"request {number}")
        for number, entry in enumerate([inputs] if isinstance(inputs, str | Mapping) else inputs, 1)
    ]


def refuse_broken(requests: Iterable[Request]) -> None:
    """Raise InputError with a line for each request that cannot run."""
    if faults := [f"{request.location}: {request.error}" for request in requests if request.error]:
        raise InputError("\n".join(faults))


def resolved(requests: Iterable[Request], graph: Graph, common: Mapping[str, Any]) -> list[Request]:
    """Return ``requests`` with every input of ``graph``: from itself, ``common`` or the default.

    A request whose inputs the graph refuses gets an ``error``. Raises InputError if ``common`` has
    an unknown input.
    """
    if unknown := [name for name in common if name not in graph.inputs]:
        graph.for_planning({name: common[name] for name in unknown})
    results = []
    for request in requests:
        try:
            results.append(
                request
                if request.error
                else replace(request, inputs=graph.resolve({**common, **request.inputs}))
            )
        except InputError as error:
            results.append(replace(request, error=str(error)))
    return results


def _lines(data: bytes) -> Iterator[Request]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                yield _request(
                    number, parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                )
            except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are subclasses
                yield Request(number, {}, f"is not JSON: {error}")


def _rows(data: bytes) -> Iterator[Request]:
    try:
        text = data.decode("utf-8-sig")
    except ValueError as error:
        raise InputError(f"the CSV file is not UTF-8: {error}") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Request(number, {}, f"is not CSV: {error}")
            continue
        if not any(cell.strip() for cell in row):
            continue
        if not header:
            header = [cell.strip() for cell in row]
        elif len(row) != len(header):
            yield Request(number, {}, f"has {len(row)} cells, and the header has {len(header)}")
        else:
            yield Request(
                number, {name: cell for name, cell in zip(header, row, strict=True) if cell != ""}
            )


def _request(number: int, entry: Any) -> Request:
    match entry:
        case str():
            return Request(number, {"prompt": entry})
        case Mapping():
            return Request(
                number, {str(name): value for name, value in entry.items() if value is not None}
            )
    return Request(
        number,
        {},
        f"is a {type(entry).__name__}; "
        'give an object such as {"prompt": "a lighthouse"}, or a string',
    )
