"""Download wheels for a bare machine with a card (Python 3.12 on Linux x86-64, torch with CUDA).

    python benchmarks/card_pack.py FOLDER    the versions in constraints.txt; fails above 40 MB

bitsandbytes has a library for every version of CUDA; only the one for CUDA 13.0 stays. Dry runs are
not packed: a stored dry run is valid only for the exact versions and files of its libraries, and a
new one takes seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# such a machine has torch, accelerate, networkx, numpy, psutil, PyYAML, typer, pytest and their
# dependencies
NEEDED = (
    "transformers",
    "diffusers",
    "importlib-metadata",
    "highspy",
    "bitsandbytes",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
)
PEERS = ("mmgp==3.8.2", "optimum-quanto==0.2.7", "diffusers-mm==0.4.0")
KEPT_LIBRARY = "libbitsandbytes_cuda130.so"
MOST_BYTES = 40_000_000
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17)


def pinned() -> list[str]:
    """Return the requirements, pinned to the versions in constraints.txt."""
    versions = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    versions = {name.replace("_", "-").lower(): version for name, version in versions.items()}
    return [f"{name}=={versions[name]}" if name in versions else name for name in NEEDED] + [*PEERS]


def download(folder: Path) -> None:
    """Download the wheels into ``folder``."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC] + [
        "--platform=manylinux2014_x86_64"
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(folder),
    ]
    command += [
        "--only-binary=:all:",
        "--python-version=3.12",
        "--implementation=cp",
        *platforms,
        *pinned(),
    ]
    subprocess.run(command, check=True)


def strip(wheel: Path) -> None:
    """Rewrite a wheel of bitsandbytes with one of its libraries."""
    small_wheel = wheel.with_suffix(".kept")
    with (
        zipfile.ZipFile(wheel) as whole,
        zipfile.ZipFile(small_wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as small,
    ):
        for item in whole.infolist():
            if not item.filename.endswith(".so") or item.filename.endswith(KEPT_LIBRARY):
                small.writestr(item, whole.read(item))
    small_wheel.replace(wheel)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        fresh = Path(name)
        download(fresh)
        for wheel in fresh.glob("bitsandbytes-*.whl"):
            strip(wheel)
        for old in folder.glob("*.whl"):
            old.unlink()
        for wheel in fresh.glob("*.whl"):
            wheel.replace(folder / wheel.name)
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{total / 1e6:8.2f} MB  in {folder}")
    if total > MOST_BYTES:
        sys.exit(f"that is above {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
