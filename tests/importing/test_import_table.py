"""Each tiny pipeline of the table in `docs/pipelines.md` is imported with the stages and for the
reason that the table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from campaign import sampled
from class_lists import classes_below
from import_whole import saved

from graphrun.diffusers_.dry_call import ProbeError

HEAD = "| stages | why one | classes |\n|---|---|---|\n"
IMPORTED = classes_below(HEAD)
SAMPLE = (
    "DiTPipeline",  # no encode_prompt
    "IFPipeline",  # no latents
    "LatentConsistencyModelPipeline",  # fails when split
    "StableAudioPipeline",  # an argument that the ops lack
    "StableDiffusionXLImg2ImgPipeline-float16",  # none: a cast
    "StableDiffusionXLInpaintPipeline",  # takes image and mask
)


def imported_cells(name: str, folder: Path) -> tuple[str, str]:
    """The number of stages of a class, and why it is not three; errors without their text."""
    try:
        layout = saved(name, folder).imported().layout
    except ProbeError as error:
        if match := re.search("something moves or casts (.*?) during the run", str(error)):
            return "none", (
                f"its own code casts {match[1]} during the run: give it that dtype, or attach to it"
            )
        reason = str(error).split(". ")[0].split(": import")[0].partition(" ")[2]
        return "none", f"it {reason}"
    reason = re.sub(r"(its own code fails): .*", r"\1", layout.reason)
    return "three" if len(layout.stages) == 3 else "one", reason or "-"


@pytest.mark.parametrize("name", sampled(sorted(IMPORTED), SAMPLE, "imports"))
def test_a_class_is_imported_as_documented(name: str, tmp_path: Path) -> None:
    assert imported_cells(name, tmp_path) == IMPORTED[name]
