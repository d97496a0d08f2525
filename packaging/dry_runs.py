"""hatchling's build hook: dry runs of the graphs, so that a first plan needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CODE = """
import sys
from pathlib import Path
from graphrun.graph.shipped import shipped_graphs
from graphrun.store import ship
ship(shipped_graphs(), Path(sys.argv[1]))
"""


class DryRuns(BuildHookInterface[Any]):
    """Makes the dry runs in a temporary folder, unless the tree has them, as an sdist does."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Make the dry runs, and name their folder as a part of the package."""
        if version == "editable" or (Path(self.root) / "graphrun" / "dry_runs").is_dir():
            return
        self._folder = tempfile.TemporaryDirectory()
        paths = [self.root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment["PYTHONHASHSEED"] = "0"  # transformers makes some masks in the order of a set
        command = [sys.executable, "-c", CODE, self._folder.name]
        subprocess.run(command, cwd=self.root, env=environment, check=True)
        build_data["force_include"][self._folder.name] = "graphrun/dry_runs"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()
