"""Change a package in one place at a time, and run the tests that reach that place.

``make mutants PKG=verify`` draws places at random and changes them with the operators of
cosmic-ray, in a copy of the tree. A change that no test notices survives. The results keep the
field ``equivalent`` that a person adds to a survivor: why no test can notice it.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import suppress
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import coverage
import pytest
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code, use_mutation
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.util import read_python_source

sys.path.append(str(Path(__file__).parent / "sweep"))

from campaign import about  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/mutants.json"
LIBRARIES = ("torch", "highspy", "hypothesis", "diffusers", "transformers")  # imported once
TEST_SECONDS = 3  # of CPU time, of all tests of a mutant without its change
MUTANT_SECONDS, MEMORY_BYTES = 20, 6 * 2**30  # limits of a mutant
PYTEST = ("-q", "--disable-warnings", "-p", "no:cacheprovider", "-m", "not long")

# replacements that every test notices, as << for +, or none can, as "is" for == of numbers
SENSELESS = re.compile(
    r"Binary(?!.*_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv|Pow_Mul|BitOr_BitAnd"
    r"|BitAnd_BitOr|BitXor_BitOr|LShift_RShift)$)|Comparison.*_(Eq|NotEq|LtE?|GtE?)_Is|_Is_(?!IsNot)"
    r"|_IsNot_(?!Is$)|Unary.*_(Invert|UAdd)"
)
OPERATORS = [
    name
    for name in operator_names()
    if not get_operator(name).arguments() and not SENSELESS.search(name)
]

Place = tuple[str, int, int]  # file, line, column
Mutant = tuple[str, int]  # operator, number among the changes that it can make in the file


def places(file: str) -> dict[Place, list[Mutant]]:
    """What can be changed in ``file``, except annotations and messages."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    unread = [node for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Raise))]
    for node in ast.walk(tree):
        unread += filter(None, (getattr(node, name, None) for name in ("annotation", "returns")))
    spans = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in unread]
    mutants, nodes = defaultdict[Place, list[Mutant]](list), [*ast_nodes(get_ast_from_path(file))]
    for name in OPERATORS:
        positions = get_operator(name)().mutation_positions
        starts = [start for node in nodes for start, _ in positions(node)]
        for number, start in enumerate(starts):
            if not any(first <= start < last for first, last in spans):
                mutants[file, *start].append((name, number))
    return mutants


def forked(work: Callable[[], int], seconds: int = 0) -> bool:
    """Whether ``work`` returns 0 in a process of its own; in silence, within ``seconds`` of CPU
    time and ten times as many in all."""
    if not (process := os.fork()):
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        if seconds:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            signal.alarm(10 * seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    return status == 0


class Recorder:
    """Notes the CPU seconds of each test that passes, and names it to the tracer."""

    def __init__(self, tracer: coverage.Coverage) -> None:
        self.tracer, self.seconds = tracer, dict[str, float]()
        signal.signal(signal.SIGPROF, lambda *_: pytest.skip("takes too long for each mutant"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self.tracer.switch_context(item.nodeid)
        signal.setitimer(signal.ITIMER_PROF, TEST_SECONDS)
        start = time.process_time()
        try:
            result = yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self.seconds[item.nodeid] = time.process_time() - start
        return result


def trace(package: str, tests: list[str], minutes: float) -> int:
    """Write ``trace.json``: the seconds of tests, and the tests that reach each line."""
    tracer = coverage.Coverage(None, include=[f"graphrun/{package}/*"])
    recorder = Recorder(tracer)
    with tracer.collect():
        code = pytest.main([*PYTEST, f"--minutes={minutes}", *tests], plugins=[recorder])
    data = tracer.get_data()
    lines = {os.path.relpath(file): data.contexts_by_lineno(file) for file in data.measured_files()}
    Path("trace.json").write_text(json.dumps({"seconds": recorder.seconds, "lines": lines}))
    return code


def nearest(place: Place, seconds: dict[str, float], lines: dict[str, list[str]]) -> list[str]:
    """The quickest tests that reach the statement at ``place``, or its file if it is a global."""
    tree = ast.parse(Path(place[0]).read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    starts = (node.lineno for node in statements if node.lineno <= place[1] <= node.end_lineno)
    first = max(starts, default=place[1])  # a decorator is in no statement
    reached = {test for line in range(first, place[1] + 1) for test in lines.get(str(line), ())}
    if "" in reached:
        reached.update(*lines.values())
    tests = sorted(reached & set(seconds), key=seconds.__getitem__)
    totals = accumulate(seconds[test] for test in tests)
    return [test for test, total in zip(tests, totals, strict=True) if total < TEST_SECONDS]


def survivor(place: Place, mutant: Mutant, tests: list[str]) -> dict[str, Any] | None:
    """The mutant as a record if it survives the tests."""
    operator, file = get_operator(mutant[0])(), Path(place[0])
    with use_mutation(file, operator, mutant[1]) as sources:
        if tests and not forked(lambda: pytest.main([*PYTEST, "-x", *tests]), MUTANT_SECONDS):
            return None
    lines = zip(*(source.splitlines() for source in sources), strict=False)
    old, new = next(pair for pair in lines if pair[0] != pair[1])
    record = {"file": place[0], "line": place[1], "operator": mutant[0].removeprefix("core/")}
    return {**record, "old": old.strip(), "new": new.strip(), "tests": len(tests)}


def is_syntax(file: str, mutant: Mutant) -> bool:
    """Whether the mutant can be compiled: cosmic-ray takes the * of parameters for a product."""
    with suppress(SyntaxError):
        ast.parse(mutate_code(read_python_source(file), get_operator(mutant[0])(), mutant[1]))
        return True
    return False


def sample(package: str, seed: int) -> list[tuple[Place, Mutant]]:
    """All places in an order that an edit of a file hardly changes, with one mutant each."""
    ranks = dict[bytes, tuple[Place, Mutant]]()
    for file in sorted(str(path) for path in Path("graphrun", package).rglob("*.py")):
        source = Path(file).read_text(encoding="utf-8").splitlines()
        for place, mutants in places(file).items():
            text = f"{seed} {file} {place[2]} {source[place[1] - 1]}"
            rank = hashlib.sha256(text.encode()).digest()
            ranks[rank] = place, mutants[rank[0] % len(mutants)]
    return [ranks[rank] for rank in sorted(ranks)]


def add(name: str, result: dict[str, Any]) -> None:
    """Add ``result`` to the file, with the reasons that the file has for the same survivors."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"samples": {}}
    keys = ("file", "operator", "old", "new")
    reasons = {
        tuple(survivor[key] for key in keys): survivor["equivalent"]
        for sample in results["samples"].values()
        for survivor in sample["survived"]
        if "equivalent" in survivor
    }
    for survivor in result["survived"]:
        if reason := reasons.get(tuple(survivor[key] for key in keys)):
            survivor["equivalent"] = reason
    count = sum("equivalent" not in survivor for survivor in result["survived"])
    result["share"] = round(count / max(result["tried"], 1), 3)
    print(f"{name}: {result['tried']} tried, {result['killed']} killed, {count} survived")
    results["about"], results["samples"][name] = about(), result
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Try mutants of a package, and record how many survive."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("tests", nargs="+", help="files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    files = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(lambda name: (ROOT / name).exists(), files.decode().split("\0")[:-1]):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder, name))
        os.chdir(folder)
        sys.path[:0], os.environ["PYTHONPATH"] = [folder], folder
        for library in LIBRARIES:
            import_module(library)
        forked(lambda: trace(options.package, options.tests, options.minutes / 3))
        traced = json.loads(Path("trace.json").read_text())
        count, survivors = 0, list[dict[str, Any]]()
        for place, mutant in sample(options.package, options.seed):
            if time.monotonic() > end or count == options.count:
                break
            if not is_syntax(place[0], mutant):
                continue
            tests = nearest(place, traced["seconds"], traced["lines"].get(place[0], {}))
            count += 1
            if record := survivor(place, mutant, tests):
                survivors.append(record)
                print("\r{file}:{line}: {old}  ->  {new}".format(**record))
            print(f"\r{count} of {options.count}, {len(survivors)} survive", end="", flush=True)
    result = {"tried": count, "killed": count - len(survivors), "survived": survivors}
    print()
    add(f"{options.package}, seed {options.seed}", {**result, "tests": options.tests})


if __name__ == "__main__":
    main()
