"""Prints what a script of this folder found, with versions. A script's ``reproduce`` returns what
happened, ``shown`` among it."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

PACKAGES = ("torch", "diffusers", "transformers", "accelerate")


def show(reproduce: Callable[[], dict[str, Any]]) -> None:
    """Exit code 0 where the defect showed, 1 where these versions no longer have it."""
    warnings.filterwarnings("ignore")
    result = reproduce()
    print(
        json.dumps(
            {
                "defect": reproduce.__doc__,
                **result,
                "versions": {name: version(name) for name in PACKAGES},
            },
            indent=1,
        )
    )
    sys.exit(0 if result["shown"] else 1)
