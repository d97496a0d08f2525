"""hatchling's build backend. It requires graphrun's dependencies if a build has to make dry runs.

Dry runs count only for the versions of torch and diffusers that made them, so those of
constraints.txt make them. A tree that has ``graphrun/dry_runs``, as an sdist has, needs none.
``pip wheel . -C dry-runs=no`` leaves them out.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling import build
from hatchling.build import *  # noqa: F403

Settings = dict[str, Any] | None
DRY_RUNS = Path("graphrun/dry_runs")
# Dry runs count for one version of these, as in graphrun/store.py.
PINNED = ("torch", "diffusers", "transformers", "tokenizers", "accelerate", "bitsandbytes")


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return what a wheel is built with."""
    _read(config_settings)
    return [*build.get_requires_for_build_wheel(config_settings), *_dry_run_requirements()]


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """Return what an sdist is built with."""
    _read(config_settings)
    return [*build.get_requires_for_build_sdist(config_settings), *_dry_run_requirements()]


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel; return its name."""
    _read(config_settings)
    return build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Build an sdist; return its name."""
    _read(config_settings)
    return build.build_sdist(sdist_directory, config_settings)


def _read(config_settings: Settings) -> None:
    if (config_settings or {}).get("dry-runs") == "no":
        os.environ["HATCH_BUILD_NO_HOOKS"] = "true"


def _dry_run_requirements() -> list[str]:
    """Return graphrun's dependencies, those of ``PINNED`` in the version of constraints.txt."""
    if DRY_RUNS.is_dir() or os.environ.get("HATCH_BUILD_NO_HOOKS") == "true":
        return []
    lines = Path("constraints.txt").read_text("utf-8").splitlines()
    pins = {_name(line): line for line in lines if "==" in line}
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    return [
        pins[name] if (name := _name(requirement)) in PINNED else requirement
        for requirement in project["dependencies"]
    ]


def _name(requirement: str) -> str:
    """Return the normalized name of the package in ``requirement``."""
    (name,) = re.findall(r"^[\w.-]*\w", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()
