"""The scripts and notebooks of examples/ run, each in a folder of its own."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from campaign import sampled
from documents import ROOT

FOLDER = ROOT / "examples"
FILES = sorted(
    path.name
    for path in FOLDER.iterdir()
    if path.suffix in (".py", ".ipynb") and path.stem != "tiny_flux"
)
# What each leaves behind or prints.
MADE = {
    "attach.ipynb": "call/2:transformer",
    "attach.py": "attach-1.png",
    "compare_modes.py": "graphrun",
    "many_prompts.py": "many-3.png",
    "plan_and_run.py": "plan-and-run.png",
    "read_a_plan.ipynb": "nothing fits",
    "smallest_budget.py": "nothing fits",
}


def test_every_example_is_known() -> None:
    assert set(FILES) == set(MADE)


@pytest.mark.parametrize("name", sampled(FILES, ["plan_and_run.py"], "docs"))
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    if name.endswith(".py"):
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    else:
        names: dict[str, object] = {"__name__": "__main__"}
        for cell in json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs")
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), name, "exec"), names)
    assert (tmp_path / MADE[name]).exists() or MADE[name] in capsys.readouterr().out


@pytest.mark.long
def test_two_plain_calls_of_the_example_pipeline_are_equal() -> None:
    sys.path.append(str(FOLDER))
    from tiny_flux import tiny_flux

    pipe = tiny_flux()
    first, second = (
        pipe(
            "a lighthouse",
            height=32,
            width=32,
            num_inference_steps=1,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images  # fmt: skip
        for _ in range(2)
    )
    assert torch.equal(first, second)
