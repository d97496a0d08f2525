"""The table in `docs/pipelines.md` of the stages that each tiny pipeline is imported with, and the reason where these are not
three.

Importing all takes too long for every run: a sample with every kind of row is imported, and the names in the table are compared.
`--update-golden` imports all and writes the table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from import_whole import saved
from tiny_pipelines import cases

from graphrun.diffusers_.dry_call import ProbeError

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "pipelines.md"
HEAD = "| class | imported as | since |\n|---|---|---|\n"
SAMPLE = (
    "AnimateDiffVideoToVideoPipeline",  # takes video
    "CogView4Pipeline",
    "DiTPipeline",  # no encode_prompt
    "FluxPipeline",
    "IFPipeline",  # no latents
    "KandinskyV22CombinedPipeline",
    "KandinskyV22Pipeline",  # not
    "LatentConsistencyModelPipeline",  # fails when split
    "StableAudioPipeline",  # an argument that the ops lack
    "StableCascadeDecoderPipeline",  # not
    "StableDiffusionControlNetPipeline-two",
    "StableDiffusionXLImg2ImgPipeline-float16",  # not: a cast
    "StableDiffusionXLInpaintPipeline",  # takes image and mask
    "WanPipeline-two-experts",
    "ZImagePipeline",
)


def rows() -> dict[str, str]:
    """The table's rows by class."""
    found = DOCUMENT.read_text().partition(HEAD)[2].partition("\n\n")[0].splitlines()
    return {row.split(" | ")[0].removeprefix("| "): row for row in found}


def row_of(name: str, folder: Path) -> str:
    try:
        layout = saved(name, folder).imported().layout
    except ProbeError as error:
        if found := re.search("something moves or casts (.*?) during the run", str(error)):
            return f"| {name} | not | its own code casts {found[1]} during the run: give it that dtype, or attach to it |"
        return f"| {name} | not | it {str(error).split('. ')[0].split(': import')[0].partition(' ')[2]} |"
    return f"| {name} | {'three stages' if len(layout.stages) == 3 else 'one stage'} | {layout.why or '-'} |"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", sorted(cases()) if metafunc.config.getoption("--update-golden") else SAMPLE)


def test_a_class_is_imported_as_the_table_says(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    row = row_of(name, tmp_path)
    if request.config.getoption("--update-golden"):
        before, _, after = DOCUMENT.read_text().partition(HEAD)
        table = sorted({**rows(), name: row}.values())
        DOCUMENT.write_text(before + HEAD + "\n".join(table) + "\n\n" + after.partition("\n\n")[2])
    assert rows()[name] == row


def test_the_table_has_every_class_and_no_other() -> None:
    assert set(rows()) == set(cases())
    assert len({name for name, row in rows().items() if "| not |" not in row}) >= 50
