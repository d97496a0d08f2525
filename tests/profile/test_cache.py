"""Cached dry runs, problems and plans: no torch and no solver on a hit, and never a wrong entry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun import store as cache
from graphrun.disk_store import Store
from graphrun.files import digest_of
from graphrun.modules import source_files
from graphrun.profile import hardware as devices
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.profile.recording import DryRun
from graphrun.sequence import divided_run
from graphrun.solve.infeasible import smallest_budget
from graphrun.units import MIB

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
TINY = GRAPHS / "flux-tiny.yaml"


@pytest.fixture
def dry_run_heights(monkeypatch: pytest.MonkeyPatch, dry: Any) -> list[str]:
    """The heights of the dry runs that were made; each returns flux-tiny's own dry run, which all
    tests share."""
    heights: list[str] = []

    def probe(graph: Any, inputs: Any, options: Any = None) -> Any:
        heights.append(str(inputs["height"]))
        return dry("flux-tiny")[1]

    monkeypatch.setattr(cache, "_probe", probe)
    return heights


@pytest.fixture
def solved_digests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The digests of the problems that were solved."""
    from graphrun.solve import solve

    digests: list[str] = []
    real = solve.solve

    def count(problem: Any) -> Any:
        digests.append(problem.digest)
        return real(problem)

    monkeypatch.setattr(solve, "solve", count)
    return digests  # type: ignore[return-value]


def estimate(folder: Path | None, vram: int = 64 * MIB, **inputs: Any) -> Any:
    return graphrun.estimate(
        graphrun.load(TINY), vram=vram, ram="8G", hardware="sim", inputs=inputs, cache=folder
    )


@pytest.mark.parametrize("name", ["flux-tiny", "sdxl-tiny"])
def test_a_dry_run_read_back_gives_the_same_numbers(dry: Any, name: str) -> None:
    graph, dry_run, inputs = dry(name)
    copy = DryRun.from_json(json.loads(json.dumps(dry_run.to_json())))
    assert copy == dry_run
    for hardware in ("sim", "rtx4090"):
        arguments = devices.hardware(hardware), ProblemLimits(2**33, 2**33), inputs
        assert (
            problem_of(graph, copy, *arguments).digest
            == problem_of(graph, dry_run, *arguments).digest
        )


def test_a_dry_run_is_made_once_for_all_budgets_and_again_for_other_sizes(
    dry_run_heights: list[str], tmp_path: Path
) -> None:
    first = estimate(tmp_path)
    assert estimate(tmp_path) == first
    assert estimate(tmp_path, vram=65 * MIB).budget_bytes == 65 * MIB
    assert estimate(tmp_path, prompt="a dog", seed=7).digest == first.digest
    assert dry_run_heights == ["128"]
    estimate(tmp_path, height=64)
    assert dry_run_heights == ["128", "64"]


def test_without_a_folder_nothing_is_stored(dry_run_heights: list[str], tmp_path: Path) -> None:
    assert estimate(None) == estimate(None)
    assert dry_run_heights == ["128", "128"]


@pytest.mark.sweep("more")
def test_a_plan_is_solved_once(
    dry_run_heights: list[str], solved_digests: list[str], tmp_path: Path
) -> None:
    problem = estimate(tmp_path)
    first = graphrun.plan(problem, cache=tmp_path)
    assert graphrun.plan(problem, cache=tmp_path) == first == graphrun.plan(problem)
    assert solved_digests == [problem.digest] * 2
    graphrun.plan(estimate(tmp_path, vram=65 * MIB), cache=tmp_path)
    assert len(solved_digests) == 3


def test_a_frontier_point_is_a_stored_plan(
    dry_run_heights: list[str], solved_digests: list[str], tmp_path: Path
) -> None:
    problem = estimate(tmp_path)
    solution = cache.fitting_for(problem, Store(tmp_path))
    assert (
        graphrun.plan(problem, cache=tmp_path)
        == solution
        == cache.fitting_for(problem, Store(tmp_path))
    )
    assert not solved_digests
    assert cache.fitting_for(replace(problem, budget_bytes=MIB), Store(tmp_path)) is None


def test_other_versions_and_another_source_are_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graphrun.load(TINY)
    inputs = graph.for_planning({})
    first_key = cache.trace_key(graph, inputs)
    assert first_key == cache.trace_key(graph, inputs) is not None
    monkeypatch.setattr(cache, "version", lambda name: "9.9")
    other_versions = cache.trace_key(graph, inputs)
    monkeypatch.undo()
    monkeypatch.setattr(cache, "own_source", lambda: "edited")
    assert len({first_key, other_versions, cache.trace_key(graph, inputs)}) == 3


def test_a_shipped_dry_run_serves_the_defaults_and_any_build_of_the_same_releases(
    dry_run_heights: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # the second names another package's classes
    cache.ship(["flux-tiny", "pyramid-flow"], tmp_path)
    monkeypatch.setattr(cache, "SHIPPED", tmp_path)
    dry_run_heights.clear()
    assert estimate(None) == estimate(tmp_path / "cache")
    release = cache.version
    monkeypatch.setattr(cache, "version", lambda name: f"{release(name).partition('+')[0]}+cu130")
    estimate(None)
    assert dry_run_heights == []
    estimate(None, height=96)
    monkeypatch.setattr(cache, "version", lambda name: f"{release(name).partition('+')[0]}.1")
    estimate(None)
    assert dry_run_heights == ["96", "128"]


def test_a_shipped_dry_run_does_not_depend_on_when_the_wheel_was_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of ``shapes``, whose weights are in the wheel. Other files count by their times."""
    shutil.copytree(GRAPHS, tmp_path / "graphs")
    for path in (GRAPHS, tmp_path / "graphs"):
        graph = graphrun.load(path / "shapes.yaml")
        inputs = graph.for_planning({})
        keys = []
        for seconds in (1, 2):
            stamp = lambda file, times=seconds: (os.stat(file).st_size, times)  # noqa: E731
            monkeypatch.setattr(source_files, "file_stamp", stamp)
            monkeypatch.setattr(cache, "file_stamp", stamp)
            keys.append((cache.shipped_key(graph, inputs), cache.trace_key(graph, inputs)))
        (first, first_key), (second, second_key) = keys
        assert None not in (first, first_key)
        assert (first == second, first_key == second_key) == (path == GRAPHS, False)


def test_the_key_depends_on_whether_a_prompt_is_empty_but_not_on_its_text(tmp_path: Path) -> None:
    graph = graphrun.load(GRAPHS / "sdxl-tiny.yaml")
    text = next(name for name, item in graph.inputs.items() if item.type == "str")
    keys = [
        cache.trace_key(graph, {**graph.for_planning({}), text: value})
        for value in ("a", "b c", "", None)
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_graph_that_depends_on_unversioned_code_is_not_stored() -> None:
    graph = graphrun.load(TINY)
    inputs = graph.for_planning({})
    assert cache.trace_key(replace(graph, trust=(*graph.trust, "somebodys_module")), inputs) is None
    component = replace(graph.components["vae"], has_config=False, source="owner/repo/vae")
    assert (
        cache.trace_key(replace(graph, components={**graph.components, "vae": component}), inputs)
        is None
    )


@pytest.mark.sweep("more", sample=1)
@pytest.mark.parametrize(
    "data",
    [None, {}, [], {"components": 3}, {"calls": [], "items": [[1]], "values": {}, "profiles": {}}],
)
@pytest.mark.parametrize("kind", ["trace", "problem", "plan"])
def test_an_entry_of_another_shape_is_replaced(
    dry_run_heights: list[str], solved_digests: list[str], tmp_path: Path, kind: str, data: Any
) -> None:
    problem = estimate(tmp_path)
    solution = graphrun.plan(problem, cache=tmp_path)
    store = Store(tmp_path)
    keys = dict(entry.key.split("-") for entry in store.entries())
    store.put_json(kind, keys[kind], data)
    if kind == "trace":
        store.remove([f"problem-{keys['problem']}"])
    assert estimate(tmp_path) == problem
    assert graphrun.plan(problem, cache=tmp_path) == solution
    assert store.get_json(kind, keys[kind]) != data


def test_a_stored_plan_that_breaks_a_rule_is_ignored(
    dry_run_heights: list[str], solved_digests: list[str], tmp_path: Path
) -> None:
    problem = estimate(tmp_path)
    solution = graphrun.plan(problem, cache=tmp_path)
    key = digest_of([problem.digest, cache.own_source()])
    lines = str(solution.plan).splitlines()
    evict = next(n for n, line in enumerate(lines) if line.strip().startswith("evict"))
    wrong = {
        "plan": "\n".join(lines[:evict] + lines[evict + 1 :]),
        "cut": [],
        "proof": [True, 0.0, 0.0, 0.0],
    }
    Store(tmp_path).put_json("plan", key, wrong)
    assert graphrun.plan(problem, cache=tmp_path) == solution
    assert len(solved_digests) == 2


@pytest.mark.sweep("more")
def test_a_plan_split_into_layers_is_stored_with_the_split_components(
    dry_run_heights: list[str], solved_digests: list[str], tmp_path: Path
) -> None:
    problem = estimate(tmp_path)
    tight = replace(problem, budget_bytes=smallest_budget(problem))
    solution = graphrun.plan(tight, cache=tmp_path)
    assert "layers" in {component.granularity for component in solution.problem.components}
    assert graphrun.plan(tight, cache=tmp_path) == solution
    assert len(solved_digests) == 1


def test_a_cached_plan_imports_no_torch_and_no_solver_and_is_equal(
    dry_run_heights: list[str], tmp_path: Path, cache_home: Path
) -> None:
    folder = tmp_path / "graphrun"
    solution = graphrun.plan(estimate(folder), cache=folder)
    files = sorted(folder.iterdir())
    code = f"""
import sys
from graphrun.cli.main import main
sys.argv = ["graphrun", "plan", {str(TINY)!r}, "--vram", "64M", "--ram", "8G"]
sys.argv += ["--hardware", "sim", "--json"]
try:
    main()
finally:
    heavy = {{"torch", "diffusers", "transformers", "numpy", "scipy", "highspy", "networkx"}}
    heavy |= {{"graphrun.solve.solve"}}
    heavy &= sys.modules.keys()
    assert not heavy, heavy
"""
    environment = {
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(GRAPHS.parent),
    }
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["digest"] == solution.problem.digest
    assert sorted(folder.iterdir()) == files


@pytest.mark.parametrize("module", ["graphrun", "graphrun.cli.main"])
def test_importing_is_light(module: str) -> None:
    heavy = {
        "torch",
        "diffusers",
        "transformers",
        "numpy",
        "scipy",
        "highspy",
        "networkx",
        "graphrun.solve.solve",
    }
    code = f"import sys, {module}; print(*sorted({heavy!r} & sys.modules.keys()))"
    environment = {"PATH": "", "PYTHONPATH": str(GRAPHS.parent)}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == []


def test_only_the_source_of_graphrun_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    read_paths = list[Path]()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_paths.append(path) or b"")
    cache.own_source.__wrapped__()
    package = Path(graphrun.__file__).parent
    assert package / "store.py" in read_paths
    assert {path for path in read_paths if package not in path.parents} == set()


@pytest.mark.sweep("more")
@pytest.mark.parametrize(("frozen", "fails"), [(False, True), (True, False)])
def test_the_garbage_collector_state_is_restored(
    monkeypatch: pytest.MonkeyPatch, dry: Any, fails: bool, frozen: bool
) -> None:
    import gc

    from graphrun.profile import dry_run as probe

    monkeypatch.setattr(gc, "get_freeze_count", gc.get_freeze_count.__wrapped__)
    frozen_states, tiny_dry_run = list[bool](), dry("flux-tiny")[1]
    gc.freeze() if frozen else gc.unfreeze()
    frozen_count, new_objects = gc.get_freeze_count(), [[number] for number in range(1000)]

    def answer(graph: Any, inputs: Any, options: Any, on_built: Any) -> Any:
        assert not gc.isenabled()
        on_built()
        frozen_states.append(gc.isenabled() and gc.get_freeze_count() > 0)
        if fails:
            raise RuntimeError("the pipeline's own")
        return tiny_dry_run

    graph = graphrun.load(TINY)
    monkeypatch.setattr(probe, "probe", answer)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        cache.dry_run(graph, graph.for_planning({}), None)
    assert (frozen_states, gc.isenabled()) == ([True], True)
    limit = frozen_count + len(new_objects) // 2 if frozen else 0
    assert gc.get_freeze_count() <= limit, (
        "who froze what there was knows why; more is not added to it"
    )
    gc.freeze()


def test_the_source_digest_reads_only_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    read_paths: list[Path] = []
    content = Path.read_bytes

    def recorded(path: Path) -> bytes:
        read_paths.append(path)
        return content(path)

    monkeypatch.setattr(Path, "read_bytes", recorded)
    cache.own_source.__wrapped__()
    package = Path(graphrun.__file__).parent
    assert package / "store.py" in read_paths
    assert [path for path in read_paths if not path.is_relative_to(package)] == []


@pytest.mark.parametrize(
    ("name", "inputs", "reason"),
    [
        ("flux-tiny", {"max_sequence_length": 63}, "divisible by mesh size"),
        ("sdxl-tiny", {}, None),  # nothing of it can be divided
    ],
)
def test_what_cannot_be_divided_is_stored_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, inputs: Any, reason: str | None
) -> None:
    graph_names, probe = list[str](), cache._probe
    monkeypatch.setattr(
        cache, "_probe", lambda graph, *rest: graph_names.append(graph.name) or probe(graph, *rest)
    )
    graph, store = graphrun.load(GRAPHS / f"{name}.yaml"), Store(tmp_path)
    arguments = {"inputs": inputs, "vram": "1G,1G", "ram": "8G", "hardware": "sim"}
    problem = graphrun.estimate(graph, **arguments, cache=tmp_path)
    counts = []
    for _ in range(2):
        divided = divided_run(graph, problem, arguments, store)
        assert reason in divided.refusal if reason else divided is None
        counts.append(len(graph_names))
    assert counts[1] == counts[0]
