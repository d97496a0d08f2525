"""SD3 without T5: a run draws what diffusers' pipeline draws with ``text_encoder_3=None``, and its
plan file remembers what is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from whole_pipelines import TinyPipeline, pixels, planned

SMALL = {"prompt": "a lighthouse", "steps": 2, "height": 32, "width": 32}


def test_a_run_without_t5_draws_what_diffusers_draws() -> None:
    tiny = TinyPipeline("sd3-tiny", SMALL, absent=["text_encoder_3"])
    problem = tiny.smallest()
    trace = tiny.run(problem, planned(problem))
    assert np.array_equal(pixels(trace.outputs["image"]), tiny.image)
    assert problem.absent == ("text_encoder_3",)
    whole = TinyPipeline("sd3-tiny", SMALL)
    assert not np.array_equal(whole.image, tiny.image), "T5 changes the picture"
    assert problem.budget_bytes <= whole.smallest().budget_bytes


@pytest.mark.sweep("more")
def test_a_plan_file_runs_without_the_option(
    graphrun: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    plan, picture = tmp_path / "plan.json", tmp_path / "picture.png"
    sets = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    budgets = ("--device", "sim", "--vram", "4M", "--ram", "1G", "--without", "text_encoder_3")
    code, screen, _ = graphrun("plan", "sd3-tiny", *budgets, *sets, "-o", str(plan))
    assert code == 0
    assert "sd3-tiny without text_encoder_3" in screen
    run = ("run", str(plan), "--random-weights", "-o", str(picture))
    assert graphrun(*run)[0] == 0
    assert picture.is_file()
