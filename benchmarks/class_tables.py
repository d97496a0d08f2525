"""Write the tables of pipeline classes in docs/pipelines.md: imported, attached, features.

    make pipelines                                              all tables; ten minutes on a core
    python benchmarks/class_tables.py features                  one: imports, attached or features
    python benchmarks/class_tables.py attached ZImagePipeline   rows of attached classes

Features are switched while attached. `make sweep` compares the page with the same functions.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
sys.path[:0] = [
    str(ROOT),
    *(str(ROOT / "tests" / part) for part in ("attach", "importing", "sweep")),
]

import class_rows  # noqa: E402
import test_import_table  # noqa: E402


def imports() -> Iterator[str]:
    for name in test_import_table.rows():
        with tempfile.TemporaryDirectory() as folder:
            yield test_import_table.row_of(name, Path(folder))


def attached() -> Iterator[str]:
    yield from map(class_rows.attached_row, sorted(class_rows.CASES))


def features() -> Iterator[str]:
    yield from map(class_rows.feature_row, class_rows.SWITCHES)


TABLES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "imports": (test_import_table.HEAD, imports),
    "attached": (class_rows.HEADS["attached"], attached),
    "features": (class_rows.HEADS["features"], features),
}


def printed(row: str) -> str:
    print(row, flush=True)
    return row


def attached_rows(names: list[str]) -> None:
    """Replace the rows of the classes ``names`` in the table of attached classes."""
    if unknown := set(names) - class_rows.CASES.keys():
        sys.exit(f"there is no class {min(unknown)} in tests/attach/tiny_pipelines.yaml")
    head = class_rows.HEADS["attached"]
    rows = {name: printed(class_rows.attached_row(name)) for name in names}
    class_rows.write(
        head, [row for _, row in sorted({**class_rows.documented(head), **rows}.items())]
    )


def main() -> None:
    if sys.argv[1:2] == ["attached"] and sys.argv[2:]:
        return attached_rows(sys.argv[2:])
    if unknown := set(sys.argv[1:]) - TABLES.keys():
        sys.exit(f"there is no table {min(unknown)}; there are: {', '.join(TABLES)}")
    for name in sys.argv[1:] or TABLES:
        head, rows = TABLES[name]
        class_rows.write(head, [printed(row) for row in rows()])


if __name__ == "__main__":
    main()
