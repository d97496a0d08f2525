"""``run --divide``: one process for each of several equal devices, which divide the sequence of a
transformer; here two on the CPU, which exchange tensors by gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_attach_divided import divide, in_two_processes, process_group
from whole_pipelines import pixels, plain_image

import graphrun as api
from graphrun.cli.dividing import rank_of, take_device
from graphrun.errors import InputError
from graphrun.modules.build import build

INPUTS = {"height": 64, "width": 64, "steps": 2, "prompt": "a boat"}
SETS = [word for name, value in INPUTS.items() for word in ("--set", f"{name}={value}")]
ON_CPU = ("--device", "cpu", "--dtype", "graph", "--divide", "2")


def run_in_two(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphrun", "run", *arguments, *ON_CPU]
    environment = {**os.environ, "GRAPHRUN_CACHE": str(folder / "cache")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def divided_picture(folder: Path, rank: int) -> Any:
    """Return the pixels of diffusers' pipeline, whose transformer both processes divide."""
    graph = api.load("flux-tiny")
    modules = {name: build(component, graph) for name, component in graph.components.items()}
    with process_group(folder, rank):
        divide(modules["transformer"])
        return pixels(plain_image(graph, modules, graph.resolve(INPUTS)))


@pytest.mark.sweep("more")
def test_two_processes_write_one_picture_with_the_bits_of_diffusers(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    result = run_in_two("flux-tiny", *SETS, "--memory", "4G", "-o", str(path), folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("wrote ") == 1
    assert "2 GiB of memory" in " ".join(result.stdout.split()), "half of it for each"
    assert "the run stayed within the planned memory" in result.stdout
    picture = np.asarray(Image.open(path))
    for expected in in_two_processes(divided_picture, tmp_path):
        assert np.array_equal(picture, expected), expected


@pytest.mark.sweep("more")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("sdxl-tiny", "--memory", "4G"), 2, "no component whose sequence can be divided"),
        (("flux-tiny", *SETS, "--memory", "40M"), 3, "minimum memory"),
        (("flux-tiny", "--set", "max_sequence_length=63", "--memory", "4G"), 2, "mesh size"),
    ],
)
def test_what_cannot_run_ends_all_processes_with_one_message(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    result = run_in_two(*arguments, folder=tmp_path)
    assert result.returncode == code, result.stderr
    assert (result.stdout + result.stderr).count(message) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--resume",), "--divide is for one run of a graph, without --inputs, --resume"),
        (("--reuse", "all"), "without --reuse all"),
        (("--vram", "2G,2G"), "all devices are equal; name one, --vram 2G"),
    ],
)
def test_options_of_other_runs_are_refused(
    graphrun: Any, arguments: tuple[str, ...], message: str
) -> None:
    code, _, text = graphrun("run", "flux-tiny", "--divide", "2", *arguments)
    assert code == 2
    assert message in " ".join(text.split())


def test_a_process_takes_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert rank_of(2) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank_of(2) == 1
    with pytest.raises(InputError, match="--divide 4, but 2 processes were started"):
        rank_of(4)
    for visible, expected in (("3,5", "5"), ("", "1")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        take_device(1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(InputError, match="no device for process 1"):
        take_device(1)
