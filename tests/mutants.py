"""Change a package in one place at a time, and run the tests that reach that place.

``make mutants PKG=verify`` draws places at random and changes them with the operators of
cosmic-ray, in a copy of the tree. A change survives if tests reach it and none notices it. It is
``unreached`` if no test reaches it within the limits: that counts neither as killed nor as
survived. The results keep the field ``equivalent`` that a person adds to a survivor: why no test
can notice it.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
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
START_SECONDS, MEMORY_BYTES = 20, 6 * 2**30  # limits of a mutant, in addition to its tests' time
TOO_LONG, LEFT = "takes too long for each mutant", "no time left"  # reasons to skip a test
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
    for node in ast.walk(tree):  # the * before keyword parameters, which is no product
        if isinstance(node, ast.arguments) and node.args:
            ends = [(n.end_lineno, n.end_col_offset) for n in (*node.args, *node.defaults)]
            starts = [(n.lineno, n.col_offset) for n in node.kwonlyargs]
            spans += [(max(ends), start) for start in starts[:1]]
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
    """Notes the CPU seconds of each test that passes, and names it to the tracer.

    Skips a test that takes over ``test_seconds`` of CPU time or ten times as many in all, and tests
    that begin after ``end``.
    """

    def __init__(self, tracer: coverage.Coverage, test_seconds: float, end: float) -> None:
        self.tracer, self.test_seconds, self.end = tracer, test_seconds, end
        self.seconds, self.counts = dict[str, float](), Counter[str]()
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, lambda *_: pytest.skip(TOO_LONG))
            os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip(LEFT)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self.tracer.switch_context(item.nodeid)
        signal.setitimer(signal.ITIMER_PROF, self.test_seconds)
        signal.setitimer(signal.ITIMER_REAL, 10 * self.test_seconds)
        start = time.process_time()
        try:
            result = yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.seconds[item.nodeid] = time.process_time() - start
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            reasons = (reason for reason in (TOO_LONG, LEFT) if reason in str(report.longrepr))
            self.counts[next(reasons, report.outcome)] += 1


def trace(package: str, tests: list[str], test_seconds: float, end: float) -> int:
    """Write ``trace.json``: the seconds of tests, the tests that reach each line, and counts."""
    tracer = coverage.Coverage(None, include=[f"graphrun/{package}/*"])
    recorder = Recorder(tracer, test_seconds, end)
    with tracer.collect():
        code = pytest.main([*PYTEST, *tests], plugins=[recorder])
    data = tracer.get_data()
    lines = {os.path.relpath(file): data.contexts_by_lineno(file) for file in data.measured_files()}
    traced = {"seconds": recorder.seconds, "lines": lines, "counts": recorder.counts}
    Path("trace.json").write_text(json.dumps(traced))
    return code


def first_line(node: Any) -> int:
    """Return the line in which a statement begins, with its decorators."""
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))


def nearest(
    place: Place, seconds: dict[str, float], lines: dict[str, list[str]], limit: float
) -> list[str]:
    """The quickest tests that reach the statement at ``place``; of a global, its file; of a default
    or decorator, the function. All of them take at most ``limit`` seconds."""
    tree = ast.parse(Path(place[0]).read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    enclosing = [n for n in statements if first_line(n) <= place[1] <= (n.end_lineno or 0)]
    statement = max(enclosing, key=first_line)
    span = range(first_line(statement), place[1] + 1)
    if isinstance(statement, ast.FunctionDef):
        span = range(statement.body[0].lineno, (statement.end_lineno or 0) + 1)
    reached = {test for line in span for test in lines.get(str(line), ())}
    if "" in reached and not isinstance(statement, ast.FunctionDef):
        reached.update(*lines.values())
    tests = sorted(reached & set(seconds), key=seconds.__getitem__)
    totals = accumulate(seconds[test] for test in tests)
    return [test for test, total in zip(tests, totals, strict=True) if total <= limit]


def outcome_of(
    place: Place, mutant: Mutant, tests: list[str], seconds: int
) -> tuple[str, dict[str, Any]]:
    """Whether the mutant is killed, survived or unreached, and its record. Tests that also fail
    without the change, by their limits for example, reach nothing."""
    operator, file = get_operator(mutant[0])(), Path(place[0])

    def is_passing() -> bool:
        return forked(lambda: pytest.main([*PYTEST, "-x", *sorted(tests)]), seconds)

    with use_mutation(file, operator, mutant[1]) as sources:
        outcome = "unreached" if not tests else "survived" if is_passing() else "killed"
    if outcome == "killed" and not is_passing():
        outcome = "unreached"
    lines = zip(*(source.splitlines() for source in sources), strict=False)
    old, new = next(pair for pair in lines if pair[0] != pair[1])
    record = {"file": place[0], "line": place[1], "operator": mutant[0].removeprefix("core/")}
    return outcome, {**record, "old": old.strip(), "new": new.strip(), "tests": len(tests)}


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
    reached = result["tried"] - len(result["unreached"])
    result["share"] = round(count / max(reached, 1), 3)
    print(f"{name}: {result['tried']} tried, {reached} reached by tests, {count} survived")
    results["about"], results["samples"][name] = about(), result
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Try mutants of a package, and record how many survive."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("tests", nargs="+", help="files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=10, help="half of them trace tests")
    parser.add_argument("--seconds", type=int, default=3, help="CPU time of tests for a mutant")
    options = parser.parse_args()
    start = time.monotonic()
    end = start + 60 * options.minutes
    files = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT)
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(lambda name: (ROOT / name).exists(), files.decode().split("\0")[:-1]):
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder, name))
        os.chdir(folder)
        sys.path[:0], os.environ["PYTHONPATH"] = [folder], folder
        # before libraries are imported, as in tests/conftest.py: forks hang with OpenMP's threads
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ["OMP_NUM_THREADS"] = "1"
        for library in LIBRARIES:
            import_module(library)
        trace_end = start + 30 * options.minutes
        forked(lambda: trace(options.package, options.tests, options.seconds, trace_end))
        if not Path("trace.json").exists():
            sys.exit("error: the tests ended the process in which they were traced")
        traced = json.loads(Path("trace.json").read_text())
        counts = {key: traced["counts"][key] for key in sorted(traced["counts"])}
        print("tests:", ", ".join(f"{count} {key}" for key, count in counts.items()))
        outcomes = defaultdict[str, list[dict[str, Any]]](list)
        count = 0
        for place, mutant in sample(options.package, options.seed):
            if time.monotonic() > end or count == options.count:
                break
            if not is_syntax(place[0], mutant):
                continue
            lines = traced["lines"].get(place[0], {})
            tests = nearest(place, traced["seconds"], lines, options.seconds)
            outcome, record = outcome_of(place, mutant, tests, START_SECONDS + 2 * options.seconds)
            outcomes[outcome].append(record)
            count += 1
            if outcome != "killed":
                print("\r{0}: {file}:{line}: {old}  ->  {new}".format(outcome, **record))
            print(f"\r{count} of {options.count}", end="", flush=True)
    print()
    result = {"tried": count, "killed": len(outcomes["killed"]), "traced": counts}
    result |= {key: outcomes[key] for key in ("survived", "unreached")}
    add(f"{options.package}, seed {options.seed}", {**result, "tests": options.tests})


if __name__ == "__main__":
    main()
