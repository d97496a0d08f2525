"""The table in `docs/pipelines.md` lists the pipelines that are tested and those that are known to fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_cases import ALONE, FAILING
from tiny_further import TRIED
from tiny_pipelines import cases

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "pipelines.md"
HEAD = "| pipeline | family | result |\n|---|---|---|\n"


def table() -> str:
    rows = {name: (case.family, "works") for name, case in cases().items()}
    rows |= {name: (family, "works") for name, family in ALONE.items()}
    rows |= {name: (family, "worked when tried") for family, names in TRIED.items() for name in names}
    rows |= {name: (family, why) for name, (family, why) in FAILING.items()}
    return HEAD + "".join(f"| {name} | {family} | {result} |\n" for name, (family, result) in sorted(rows.items()))


def test_the_table_is_the_list(request: pytest.FixtureRequest) -> None:
    before, _, found = DOCUMENT.read_text().partition(HEAD)
    if request.config.getoption("--update-golden"):
        DOCUMENT.write_text(before + table())
    else:
        assert HEAD + found == table()
    assert len({name.split("-")[0] for name in cases()}) >= 40
    tested = {*cases(), *ALONE}
    assert not tested & set(FAILING)
    assert not tested & {name for names in TRIED.values() for name in names}
