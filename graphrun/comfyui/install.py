"""The folder ``custom_nodes/graphrun`` of ComfyUI: one line that loads the nodes, and workflows.

ComfyUI shows the workflows among its templates.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from graphrun.errors import InputError
from graphrun.reading import read_text

MARK = "# graphrun comfyui install wrote this line"
# older versions of ComfyUI load the folder as the module graphrun, in place of the package
LINE = (
    "import sys; __name__ == 'graphrun' and sys.modules.pop(__name__); "
    f"from graphrun.comfyui.pack import *  {MARK}\n"
)
WORKFLOWS = Path(__file__).parent / "workflows"
SIGNS = ("main.py", "nodes.py", "comfy", "custom_nodes")  # in ComfyUI's folder


def install(folder: Path) -> list[Path]:
    """Write the line and the workflows into ComfyUI's ``folder``, and return the files.

    Raises InputError for another folder, and if ``custom_nodes/graphrun`` is not graphrun's.
    """
    target = _our_folder(folder)
    contents = {target / "__init__.py": LINE} | {
        target / "example_workflows" / path.name: path.read_text(encoding="utf-8")
        for path in sorted(WORKFLOWS.glob("*.json"))
        if not path.name.endswith(".api.json")
    }
    try:
        for path, text in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}") from None
    return list(contents)


def remove(folder: Path) -> list[Path]:
    """Remove what `install` wrote into ComfyUI's ``folder``, and return the files.

    Folders stay if they have other files. Raises InputError as `install` does, and if nothing is
    installed.
    """
    target = _our_folder(folder)
    if not (target / "__init__.py").is_file():
        raise InputError(f"{target}: the nodes are not installed here")
    names = [path.name for path in sorted(WORKFLOWS.glob("*.json"))]
    paths = [target / "__init__.py", *(target / "example_workflows" / name for name in names)]
    compiled_files = (target / "__pycache__").glob("__init__.*.pyc")
    our_files = [path for path in paths if path.is_file()]
    try:
        for path in (*our_files, *compiled_files):
            path.unlink()
    except OSError as error:
        raise InputError(f"{target}: cannot be removed: {error.strerror}") from None
    for path in (target / "__pycache__", target / "example_workflows", target):
        with suppress(OSError):  # it has other files, or does not exist
            path.rmdir()
    return our_files


def _our_folder(folder: Path) -> Path:
    """Return ``custom_nodes/graphrun`` in ComfyUI's ``folder``. Raises InputError."""
    if not _is_comfyui(folder):
        candidates = (folder / "ComfyUI", folder.parent, folder.parent.parent)
        hint = next((f"; did you mean {path}?" for path in candidates if _is_comfyui(path)), "")
        raise InputError(
            f"{folder} is not ComfyUI's folder, which has {', '.join(SIGNS)}"
            f"{hint or '; type the folder that you start ComfyUI in'}"
        )
    target = folder / "custom_nodes" / "graphrun"
    line_file = target / "__init__.py"
    is_empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not is_empty and not (line_file.is_file() and MARK in read_text(line_file)):
        raise InputError(
            f"{target} already exists and is not from graphrun comfyui install; move it away"
        )
    return target


def _is_comfyui(folder: Path) -> bool:
    return all((folder / name).exists() for name in SIGNS)
