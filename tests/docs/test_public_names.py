"""What the documents name can be imported from `graphrun`: errors, the functions' results, the
documented classes."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import STANDINS

import graphrun
from graphrun import limits

DOCS = Path(__file__).parents[2] / "docs"
ROWS = re.findall(
    r"^\| `(\w+)` \| `(\w+)` \| (\d+) \|", (DOCS / "errors.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("name", "base", "exit_code"), ROWS)
def test_every_documented_error_is_importable(name: str, base: str, exit_code: str) -> None:
    error = getattr(graphrun, name)
    assert name in graphrun.__all__
    assert (error.__name__, error.__mro__[1].__name__, error.exit_code) == (
        name,
        base,
        int(exit_code),
    )
    assert issubclass(error, graphrun.GraphrunError)


def test_every_documented_class_and_function_is_importable() -> None:
    names = re.findall(
        r"^::: graphrun\.(?:\w+\.)*(\w+)$", (DOCS / "python.md").read_text(), re.MULTILINE
    )
    assert len(names) > 10
    assert [
        name for name in names if name not in graphrun.__all__ or not hasattr(graphrun, name)
    ] == []


def test_every_public_name_is_documented_with_types() -> None:
    documented = re.findall(
        r"^::: graphrun\.(?:\w+\.)*(\w+)$", (DOCS / "python.md").read_text(), re.MULTILINE
    )
    assert set(graphrun.__all__) == {*documented, *(name for name, _, _ in ROWS)}
    for name in graphrun.__all__:
        value = getattr(graphrun, name)
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            untyped = [
                parameter.name
                for parameter in inspect.signature(value).parameters.values()
                if parameter.annotation is parameter.empty
            ]
            assert untyped == [], name


def test_every_type_that_a_public_function_returns_is_importable() -> None:
    functions = {
        name: value
        for name in graphrun.__all__
        if inspect.isfunction(value := getattr(graphrun, name))
    }
    returned = {
        name: str(inspect.signature(function).return_annotation)
        for name, function in functions.items()
    }
    types = {
        type_name for text in returned.values() for type_name in re.findall(r"\b[A-Z]\w+", text)
    }
    assert types - {"Any", "Callable", "Function", "None"} <= set(graphrun.__all__)
    assert {"Graph", "Problem", "Solution", "Trace", "Attachment", "Batch", "LivePipeline"} <= types


@pytest.mark.sweep("more")
@pytest.mark.long
def test_every_public_function_has_an_example_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of docs/python.md, in one namespace, on the simulated accelerator and the small
    FLUX."""
    from PIL.Image import Image, Transpose

    from graphrun.profile import hardware

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(DOCS.parent / "examples")
    monkeypatch.setattr(hardware, "detect_card", hardware.simulated)
    monkeypatch.setattr(limits.LIMITS, "steps", limits.LIMITS.steps)
    (tmp_path / "graphs").symlink_to(DOCS.parent / "graphs")
    from tiny_flux import tiny_flux

    offloads: list[tuple[object, ...]] = []
    manager = SimpleNamespace(enable_auto_cpu_offload=lambda *a, **kw: offloads.append((a, kw)))
    names = {"graphrun": graphrun, "pipe": tiny_flux(), "manager": manager, "folder": tmp_path}
    names |= {"Image": Image, "Transpose": Transpose}
    documented = re.findall(
        r"^::: graphrun\.(?:\w+\.)*([a-z]\w+)$", (DOCS / "python.md").read_text(), re.MULTILINE
    )
    for name in documented:
        _, _, example = (inspect.getdoc(getattr(graphrun, name)) or "").partition("\nExample:\n")
        assert example, f"{name}: its docstring has no example"
        for word, stand_in in STANDINS.items():
            example = example.replace(word, stand_in)
        exec(compile(textwrap.dedent(example.strip("\n")), f"example of {name}", "exec"), names)
    assert len(offloads) == 1
    assert {path.suffix for path in tmp_path.glob("*.png")} == {".png"}


def test_names_are_listed_before_their_modules_are_imported() -> None:
    code = (
        "import sys, graphrun; print({*graphrun.__all__} <= {*dir(graphrun)}, 'torch' in "
        "sys.modules, 'highspy' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.split() == ["True", "False", "False"]
