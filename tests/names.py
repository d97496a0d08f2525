"""Refuse names that do not say what a thing is: pronouns, prepositions, adverbs, participles.

`make lint` runs this.

``python tests/names.py [PATH ...]`` lists variables, parameters and attributes with such names,
and class names that several modules define. It exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("graphrun", "tests", "benchmarks", "docs", "examples", "packaging", "training")
BANNED = """
of own at by on to into onto upon with within without about above below beneath beside besides
between beyond behind before after during since against along across around among through over
under off out up down than like unlike inside outside near apart away ahead it its they them
their theirs we us our ours you your mine that this these those which what who whom whose each
every some any both either neither one ones two several many few enough such same others another
else more most less least here there where when why how now then again later earlier once twice
already still yet always together alone elsewhere back further rather asked told said given
found made held kept known seen done gone left lost taken sent shown drawn written read chosen
caught used moved wanted named needed saved stored probed planned measured loaded placed opened
entered refused changed broken mapped touched begun picked listed joined passed tried spilled
killed allowed reserved copied attached edited removed typed called timed restored grown
compared released accepted assigned dropped added counted swept locked solved tested sought
believed declared mended missing lacking running following remaining working waiting fitting
"""


def bindings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and name of every variable, parameter and attribute that ``tree`` binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def classes(tree: ast.Module) -> Iterator[str]:
    """The names of classes and of type aliases at module level."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[:1].isupper() and not name.isupper():
                yield name


def main(paths: list[Path]) -> int:
    """Print what is banned below ``paths``, and return the exit code."""
    banned, faults = set(BANNED.split()), list[str]()
    modules = defaultdict[str, list[str]](list)
    files = {file for path in paths for file in [path, *path.rglob("*.py")] if file.is_file()}
    for file in sorted(files):
        tree, place = ast.parse(file.read_text(encoding="utf-8")), file.resolve().relative_to(ROOT)
        names = sorted(bindings(tree))
        faults += [f"{place}:{line}: {name}" for line, name in names if name.strip("_") in banned]
        for name in classes(tree) if place.parts[0] == "graphrun" else ():
            modules[name].append(str(place))
    for name, places in sorted(modules.items()):
        faults += [f"{name}: in {', '.join(places)}"] if len(places) > 1 else []
    print("\n".join(faults or ["names: ok"]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main([Path(text) for text in sys.argv[1:]] or [ROOT / folder for folder in FOLDERS]))
