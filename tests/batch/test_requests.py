"""Lists of requests from files: a broken line is reported by its number, the others are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphrun.batch.requests import read_requests, refuse_broken, requests_from, resolved
from graphrun.errors import InputError


def test_json_lines(flux: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "seed": 3}\n\n"b"\r\n{"prompt": \n[1]\n'
        b'{"hight": 2}\n\xff\n{"steps": 0}\n'
    )
    requests = resolved(read_requests(file), flux, {"steps": 7})
    good = {request.number: request.inputs for request in requests if not request.error}
    assert {
        number: (inputs["prompt"], inputs["seed"], inputs["steps"])
        for number, inputs in good.items()
    } == {
        1: ("a", 3, 7),
        3: ("b", 0, 7),
    }
    errors = {request.number: request.error for request in requests if request.error}
    assert sorted(errors) == [4, 5, 6, 7, 8]
    assert "is not JSON" in errors[4]
    assert "is a list" in errors[5]
    assert "did you mean 'height'" in errors[6]
    assert "is not JSON" in errors[7]
    assert "less than the minimum" in errors[8]
    with pytest.raises(InputError, match=rf"{file}:4: is not JSON(.|\n)*{file}:8: "):
        refuse_broken(requests)


def test_csv(flux: Any, tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text('prompt,seed\n"two\nlines",1\n\nplain,\ntoo,many,cells\nbad,x\n')
    requests = resolved(read_requests(file), flux, {"seed": 5})
    assert [
        (request.number, request.inputs["prompt"], request.inputs["seed"])
        for request in requests
        if not request.error
    ] == [
        (2, "two\nlines", 1),
        (5, "plain", 5),
    ]
    assert [(request.number, request.error) for request in requests if request.error] == [
        (6, "has 3 cells, and the header has 2"),
        (7, "input 'seed': 'x' is not an int"),
    ]


def test_what_is_common_to_all_is_refused_at_once(flux: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown input 'hight'"):
        resolved(requests_from(["a"]), flux, {"hight": 3})
    for name, content in (("none.jsonl", None), ("empty.jsonl", "\n")):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(InputError, match=name):
            read_requests(tmp_path / name)
