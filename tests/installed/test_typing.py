"""A user's script is typed: the package has ``py.typed``, and public names have types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import graphrun
from graphrun import Attachment, Batch, Budget, Graph, Infeasible, Problem, Session, Solution, Trace


def plan(name: str, vram: str) -> Solution:
    graph: Graph = graphrun.load(name)
    problem: Problem = graphrun.estimate(graph, vram=vram, ram="8G", hardware="sim")
    try:
        return graphrun.plan(problem)
    except Infeasible as error:
        raise SystemExit(error.exit_code) from error


def draw(solution: Solution, name: str, prompts: list[str]) -> list[Trace]:
    graph = graphrun.load(name)
    return [graphrun.run(solution, graph, {"prompt": prompt}) for prompt in prompts]


def many(name: str, vram: str) -> Batch:
    session: Session = graphrun.Session(graphrun.load(name), runs=2, vram=vram)
    session.close()
    return graphrun.run_many(graphrun.load(name), [{"prompt": "a cat"}], vram=vram)


def attached(pipe: object) -> str:
    attachment: Attachment = graphrun.attach(pipe, vram="8G")
    return attachment.report()


budget, version = Budget(vram="8G"), graphrun.__version__.upper()
"""
WRONG = {
    'graphrun.load("flux-dev").nothing': "attr-defined",
    'graphrun.plan("flux-dev")': "arg-type",
    "graphrun.load(path=1)": "arg-type",
    "graphrun.nothing": "attr-defined",
}
# Their own types take mypy most of a minute, and say nothing about graphrun's.
CONFIG = """[mypy]
strict = True
[mypy-torch.*,diffusers.*,transformers.*,pydantic.*,networkx.*,ray.*]
follow_imports = skip
"""


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_script_is_typed_and_a_wrong_one_refused(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text("import graphrun\n" + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", "cache", "script.py", "wrong.py"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in process.stdout.splitlines() if ": error: " in line]
    assert [line.rpartition("[")[2].rstrip("]") for line in errors] == list(WRONG.values()), errors
    assert all(line.startswith("wrong.py:") for line in errors), errors
