"""Print the test files that import a package of graphrun, for `make near PKG=solve`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "graphrun"


def imported(file: Path) -> set[str]:
    """The packages and modules of graphrun that ``file`` imports, without what is in them."""
    modules = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "graphrun":
            modules |= {f"graphrun.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    names = {name.split(".")[1] for name in modules if name.startswith("graphrun.")}
    return {
        name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
    }


def main() -> None:
    """Print the files, those in the package's own folder of tests first."""
    package = sys.argv[1] if len(sys.argv) == 2 else ""
    files = [file for file in sorted(TESTS.rglob("test_*.py")) if package in imported(file)]
    if not files:
        packages = sorted({name for file in TESTS.rglob("test_*.py") for name in imported(file)})
        sys.exit(f"error: type make near PKG=NAME, with one of {', '.join(packages)}")
    files.sort(key=lambda file: package not in file.parts)
    print(" ".join(str(file.relative_to(TESTS.parent)) for file in files))


if __name__ == "__main__":
    main()
