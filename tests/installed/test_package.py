"""What a stranger gets from the package index: dependencies, a page without broken links, tested
versions of Python, and the dry runs of the versions that constraints.txt names."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from graphrun.store import LIBRARIES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# pydantic depends on it; audio files other than .wav need soundfile, whose absence is reported;
# nodes run in ComfyUI's process.
NOT_DECLARED = {"pydantic_core", "soundfile", "comfy", "comfy_api"}


def names(texts: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in texts}


@pytest.mark.sweep("more")
def test_every_imported_package_is_a_dependency() -> None:
    extras = PROJECT["optional-dependencies"]
    requirements = names(PROJECT["dependencies"]).union(
        *(names(extras[extra]) for extra in ("gguf", "serve", "cluster"))
    )
    distributions, undeclared = packages_distributions(), set()
    for path in (ROOT / "graphrun").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            else:
                continue
            for module in {module.partition(".")[0] for module in modules}:
                if module in {*sys.stdlib_module_names, "graphrun", *NOT_DECLARED}:
                    continue
                packages = {canonicalize_name(name) for name in distributions.get(module, [module])}
                if not packages & requirements:
                    undeclared.add((module, path.relative_to(ROOT).as_posix()))
    assert undeclared == set()


@pytest.fixture(scope="module")
def metadata() -> Any:
    return WheelBuilder(str(ROOT)).metadata


def test_links_and_pictures_of_the_page_lead_into_the_repository(metadata: Any) -> None:
    text = re.sub(r"```.*?```", "", metadata.core.readme, flags=re.DOTALL)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', text)
    readme = (ROOT / "README.md").read_text()
    assert len(links) == len(re.findall(r"\]\([^)]+\)", re.sub(r"```.*?```", "", readme, flags=16)))
    assert len(pictures) == 2 * text.count("<picture>") > 0
    links += [("!", link) for link in pictures]
    assert [link for _, link in links if not link.startswith("https://")] == []
    repository = PROJECT["urls"]["Homepage"]
    starts = {
        "": f"{repository}/blob/v{metadata.version}/",
        "!": repository.replace("github.com", "raw.githubusercontent.com")
        + f"/v{metadata.version}/",
    }
    for kind, link in links:
        path = link.removeprefix(starts[kind]).partition("#")[0]
        assert link.startswith(starts[kind]), link
        assert (ROOT / path).exists(), link


def test_tested_versions_of_python_are_those_that_the_package_names() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["linux"]["strategy"]["matrix"]["python"] == versions
    assert PROJECT["requires-python"] == f">={versions[0]}"


def test_dry_runs_are_made_by_the_pinned_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ROOT / "packaging" / "build_backend.py"
    spec = importlib.util.spec_from_file_location("build_backend", place)
    assert spec is not None
    assert spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HATCH_BUILD_NO_HOOKS", "")
    pins = backend.get_requires_for_build_wheel()
    assert names(pins) == names(PROJECT["dependencies"])
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert names([pin for pin in pins if pin in constraints]) == set(LIBRARIES)
    assert backend.get_requires_for_build_editable() == ["editables~=0.3"]
    assert backend.get_requires_for_build_wheel({"dry-runs": "no"}) == []
