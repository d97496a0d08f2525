"""Each tiny pipeline of the table in `docs/pipelines.md` is imported with the stages and for the
reason that the table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from campaign import sampled
from import_whole import saved

from graphrun.diffusers_.dry_call import ProbeError

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "pipelines.md"
HEAD = "| class | stages | why one |\n|---|---|---|\n"
SAMPLE = (
    "DiTPipeline",  # no encode_prompt
    "IFPipeline",  # no latents
    "LatentConsistencyModelPipeline",  # fails when split
    "StableAudioPipeline",  # an argument that the ops lack
    "StableDiffusionXLImg2ImgPipeline-float16",  # not: a cast
    "StableDiffusionXLInpaintPipeline",  # takes image and mask
)


def rows() -> dict[str, str]:
    """The table's rows by class."""
    lines = DOCUMENT.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()
    return {row.split(" | ")[0].removeprefix("| "): row for row in lines}


def row_of(name: str, folder: Path) -> str:
    try:
        layout = saved(name, folder).imported().layout
    except ProbeError as error:
        if match := re.search("something moves or casts (.*?) during the run", str(error)):
            return (
                f"| {name} | not | its own code casts {match[1]} during the run: give it that "
                "dtype, or attach to it |"
            )
        return (
            f"| {name} | not | it "
            f"{str(error).split('. ')[0].split(': import')[0].partition(' ')[2]} |"
        )
    return f"| {name} | {'three' if len(layout.stages) == 3 else 'one'} | {layout.reason or '-'} |"


@pytest.mark.parametrize("name", sampled(rows(), SAMPLE, "imports"))
def test_a_class_is_imported_as_documented(name: str, tmp_path: Path) -> None:
    assert row_of(name, tmp_path) == rows()[name]
