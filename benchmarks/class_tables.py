"""Write the tables of pipeline classes in docs/pipelines.md.

    make pipelines                                              all tables; ten minutes on a core
    python benchmarks/class_tables.py features                  one: imports, attached, modular,
                                                                features
    python benchmarks/class_tables.py attached ZImagePipeline   attached classes

Features are switched while attached. The table of modular pipelines is made of the results that
`benchmarks/modular.py` recorded. `make sweep` compares the page with the same functions.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import textwrap
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
    *(str(ROOT / "tests" / part) for part in ("attach", "docs", "importing", "sweep")),
]

import class_lists  # noqa: E402
import class_rows  # noqa: E402
import test_import_table  # noqa: E402


def imports() -> Iterator[str]:
    cells = {}
    for name in sorted(test_import_table.IMPORTED):
        with tempfile.TemporaryDirectory() as folder:
            cells[name] = shown(name, test_import_table.imported_cells(name, Path(folder)))
    return class_lists.grouped(cells)


def attached() -> Iterator[str]:
    return class_lists.grouped(
        {name: shown(name, class_rows.attached_cells(name)) for name in sorted(class_rows.CASES)}
    )


def features() -> Iterator[str]:
    for switch in class_rows.SWITCHES:
        row = class_rows.feature_row(switch)
        print(row, flush=True)
        yield row


def modular() -> Iterator[str]:
    """The table of modular pipelines; also writes the sentence with its counts."""
    text = class_lists.DOCUMENT.read_text()
    sentence = textwrap.fill(
        class_lists.modular_counts(), 120, break_long_words=False, break_on_hyphens=False
    )
    pattern = r"^Of \d+ workflows, [^.]*\."
    assert re.search(pattern, text, re.MULTILINE), f"{class_lists.DOCUMENT} has no counts"
    class_lists.DOCUMENT.write_text(re.sub(pattern, sentence, text, flags=re.MULTILINE))
    return class_lists.modular_rows()


TABLES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "imports": (test_import_table.HEAD, imports),
    "attached": (class_rows.HEADS["attached"], attached),
    "modular": (class_lists.MODULAR_HEAD, modular),
    "features": (class_rows.HEADS["features"], features),
}


def shown(name: str, cells: tuple[str, ...]) -> tuple[str, ...]:
    print(f"{name}: {'; '.join(cells)}", flush=True)
    return cells


def attached_classes(names: list[str]) -> None:
    """Replace the cells of the classes ``names`` in the table of attached classes."""
    if unknown := set(names) - class_rows.CASES.keys():
        sys.exit(f"there is no class {min(unknown)} in tests/attach/tiny_pipelines.yaml")
    head = class_rows.HEADS["attached"]
    cells = {name: shown(name, class_rows.attached_cells(name)) for name in names}
    class_lists.write(head, class_lists.grouped({**class_lists.classes_below(head), **cells}))


def main() -> None:
    if sys.argv[1:2] == ["attached"] and sys.argv[2:]:
        return attached_classes(sys.argv[2:])
    if unknown := set(sys.argv[1:]) - TABLES.keys():
        sys.exit(f"there is no table {min(unknown)}; there are: {', '.join(TABLES)}")
    for name in sys.argv[1:] or TABLES:
        head, rows = TABLES[name]
        class_lists.write(head, rows())


if __name__ == "__main__":
    main()
