"""What installed packages add: device kinds, ops and exporters. Only what the caller names or
trusts is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from graphrun import device_kinds, entry_points
from graphrun.device_kinds import kind_called
from graphrun.devices import hardware_for
from graphrun.errors import GraphError, InputError
from graphrun.graph.loading import load
from graphrun.modules.classes import resolve_function

Cli = Callable[..., tuple[int, str, str]]
Install = Callable[..., Path]
CODE = """
import pathlib
from dataclasses import replace

import graphrun
from graphrun.device_kinds import DeviceKind
from graphrun.profile.hardware import data_sheet_estimates

pathlib.Path(__file__).with_suffix(".imported").touch()
KIND = DeviceKind("stranger", opener="stranger:opened", detector="stranger:detected")
OTHER = "neither a kind nor a function"

def detected(kind):
    return replace(data_sheet_estimates()["rtx3060"], name="stranger-1", device=kind.name)

def opened(hardware, number=0, first_device=None):
    return f"{hardware.name} number {number}"

@graphrun.op()
def half(amount: float) -> dict[str, float]:
    return {"amount": amount / 2}

def unmarked(amount: float) -> dict[str, float]:
    return {"amount": amount}

def listed(graph, solution):
    return f"{graph.name} takes {len(solution.plan.slots)} slots\\n"

def failing(graph, solution):
    raise ZeroDivisionError("by nothing")

def number(graph, solution):
    return 5
"""
GRAPHS = Path(__file__).parents[1] / "graphs"
SHARED = ("--device", "sim", "--vram", "64M", "--ram", "8G", "--set", "steps=1")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs the package ``stranger`` with entry points of one group into a site folder of its
    own; returns the file that tells that it was imported."""
    site, cached = tmp_path / "site", (entry_points.installed, kind_called)

    def install(group: str, *, package: str = "stranger", **values: str) -> Path:
        folder = site / f"{package}-1.dist-info"
        folder.mkdir(parents=True)
        (site / f"{package}.py").write_text(CODE, encoding="utf-8")
        (folder / "METADATA").write_text(f"Name: {package}\nVersion: 1\n", encoding="utf-8")
        lines = [f"{name.replace('__', '.')} = {value}" for name, value in values.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]), "utf-8")
        monkeypatch.syspath_prepend(site)
        for function in cached:
            function.cache_clear()
        return site / f"{package}.imported"

    yield install
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()
    for name in ("stranger", "other"):
        sys.modules.pop(name, None)


def halved_graph(folder: Path) -> Path:
    """FLUX tiny, whose guidance is first halved by an op of the package."""
    text = (GRAPHS / "flux-tiny.yaml").read_text(encoding="utf-8")
    for name in ("configs", "tokenizers"):
        text = text.replace(f"{name}/", f"{GRAPHS}/{name}/")
    stage = "  halve: {op: stranger.half, with: {amount: $guidance_scale}}\n"
    text = text.replace("guidance_scale: $guidance_scale", "guidance_scale: $halve.amount")
    assert "$halve.amount" in text
    text = text.replace("\nstages:\n", f"\nstages:\n{stage}")
    (path := folder / "halved.yaml").write_text(text, encoding="utf-8")
    return path


# -- device kinds


def test_a_package_adds_a_device_kind(install: Install) -> None:
    install(entry_points.DEVICES, stranger="stranger:KIND")
    assert device_kinds.names()[-1] == "stranger"
    card = hardware_for(None, "stranger", to_run=True)
    assert (card.name, card.device) == ("stranger-1", "stranger")
    from graphrun.runtime.devices.open import open_hardware

    assert open_hardware(card, 1) == "stranger-1 number 1"


def test_a_kind_of_graphrun_is_not_replaced(install: Install) -> None:
    imported = install(entry_points.DEVICES, cuda="stranger:KIND")
    assert kind_called("cuda") is device_kinds.built_in()[0]
    assert list(device_kinds.names()).count("cuda") == 1
    assert not imported.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("stranger:OTHER", "has to be a DeviceKind with the name 'stranger'"),
        ("stranger:MISSING", "does not load"),
        ("no_such_module:KIND", "does not load"),
    ],
)
def test_an_entry_point_that_is_no_kind_is_refused(
    install: Install, value: str, message: str
) -> None:
    install(entry_points.DEVICES, stranger=value)
    with pytest.raises(InputError, match=message):
        hardware_for(None, "stranger")


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install(entry_points.DEVICES, stranger="stranger:KIND")
    install(entry_points.DEVICES, package="other", stranger="other:KIND")
    with pytest.raises(InputError, match="two packages add stranger, as .*:KIND and as .*:KIND"):
        kind_called("stranger")


# -- ops


def test_a_stage_names_an_op_of_a_trusted_package(install: Install, tmp_path: Path) -> None:
    imported = install(entry_points.OPS, stranger__half="stranger:half")
    path = halved_graph(tmp_path)
    with pytest.raises(GraphError, match="stranger.half is outside the trusted packages"):
        load(path)
    stage = load(path, trust=["stranger"]).stage("halve")
    with pytest.raises(GraphError, match="a file may name none of stranger; if you trust"):
        resolve_function(stage.op, (), stage.file_line)
    assert not imported.exists()
    assert resolve_function(stage.op, ["stranger"], "")(amount=3.0) == {"amount": 1.5}
    assert imported.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("other:half", "the entry point is other:half, which is not in stranger"),
        ("stranger:unmarked", "is no op: put @graphrun.op"),
        ("stranger:MISSING", "is not in .*stranger.py"),
        ("stranger", "is not in .*stranger.py"),
        ("stranger.absent:half", "cannot be imported"),
    ],
)
def test_an_entry_point_that_is_no_op_is_refused(
    install: Install, value: str, message: str
) -> None:
    install(entry_points.OPS, package="other")
    imported = install(entry_points.OPS, stranger__half=value)
    with pytest.raises(GraphError, match=message):
        resolve_function("stranger.half", ["stranger"], "graph.yaml:7")
    assert not imported.with_name("other.imported").exists()


def test_an_op_that_no_package_adds_is_refused_with_the_nearest(install: Install) -> None:
    imported = install(entry_points.OPS, stranger__half="stranger:half")
    with pytest.raises(GraphError, match=r"graph.yaml:7: .* did you mean 'stranger.half'"):
        resolve_function("stranger.hafl", ["stranger"], "graph.yaml:7")
    assert not imported.exists()


@pytest.mark.sweep("more")
def test_an_added_op_runs_in_a_graph(graphrun: Cli, install: Install, tmp_path: Path) -> None:
    """The picture is that of half the guidance."""
    install(entry_points.OPS, stranger__half="stranger:half")
    runs = {
        str(halved_graph(tmp_path)): ("guidance_scale=7", "--trust-package", "stranger"),
        "flux-tiny": ("guidance_scale=3.5",),
    }
    pictures = []
    for name, settings in runs.items():
        output = tmp_path / f"{len(pictures)}.png"
        arguments = (*SHARED, "--no-cache", "-o", str(output), "--set", *settings)
        code, _, message = graphrun("run", name, *arguments)
        assert code == 0, message
        pictures.append(Image.open(output).tobytes())
    assert pictures[0] == pictures[1]


# -- exporters


@pytest.fixture
def plan(graphrun: Cli, tmp_path: Path) -> Path:
    code, _, message = graphrun("plan", "flux-tiny", *SHARED, "-o", "plan.json")
    assert code == 0, message
    return tmp_path / "plan.json"


@pytest.mark.sweep("more")
def test_a_plan_is_written_by_an_exporter(graphrun: Cli, install: Install, plan: Path) -> None:
    imported = install(entry_points.EXPORTERS, mine="stranger:listed", sglang="stranger:listed")
    code, printed, _ = graphrun("export", str(plan), "--to", "sglang")
    assert not imported.exists()
    code, printed, message = graphrun("export", str(plan), "--to", "mine", "-o", "mine.txt")
    assert (code, printed) == (0, "wrote mine.txt\n"), message
    assert plan.with_name("mine.txt").read_text().startswith("flux-tiny takes ")


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("stranger:MISSING", "does not load"),
        (
            "stranger:failing",
            "stranger:failing fails: ZeroDivisionError: by nothing",
        ),
        ("stranger:number", "stranger:number returns a int instead of text"),
    ],
)
def test_an_exporter_that_fails_is_an_error_of_one_line(
    graphrun: Cli, install: Install, plan: Path, value: str, message: str
) -> None:
    install(entry_points.EXPORTERS, mine=value)
    code, printed, stderr = graphrun("export", str(plan), "--to", "mine")
    assert (code, printed) == (2, "")
    assert message in stderr
    assert "Traceback" not in stderr
    code, _, stderr = graphrun("export", str(plan), "--to", "absent")
    assert code == 2
    assert "engine 'absent' is not known" in stderr
