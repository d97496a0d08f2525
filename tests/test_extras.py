"""Messages name the command that installs what is missing from where graphrun itself came from."""

from __future__ import annotations

import importlib.metadata
import json
import re
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest

from graphrun import extras
from graphrun.extras import install_command

ROOT = Path(__file__).parent.parent


def test_a_checkout_is_named_by_a_dot_or_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("serve") == "pip install -e '.[serve]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("serve") == f"pip install -e '{ROOT}[serve]'"


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("file://{folder}", "pip install '{folder}[serve]'"),
        (
            "file://{folder}/graphrun-0.1.0-py3-none-any.whl",
            "pip install '{folder}/graphrun-0.1.0-py3-none-any.whl[serve]'",
        ),
        ("file://{folder}/gone", "pip install 'graphrun[serve]'"),
        ("https://example.org/graphrun.whl", "pip install 'graphrun[serve]'"),
        (None, "pip install 'graphrun[serve]'"),
    ],
)
def test_an_installed_package_is_named_by_what_it_was_installed_from(
    url: str | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a folder"
    info = tmp_path / "site" / "graphrun-0.1.0.dist-info"
    folder.mkdir()
    info.mkdir(parents=True)
    (folder / "graphrun-0.1.0-py3-none-any.whl").touch()
    if url is not None:
        text = url.format(folder=str(folder).replace(" ", "%20"))
        (info / "direct_url.json").write_text(json.dumps({"url": text, "dir_info": {}}))
    monkeypatch.setattr(extras, "_PACKAGE", tmp_path / "site" / "graphrun")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: PathDistribution(info))
    assert install_command("serve") == command.format(folder=folder)


def test_every_message_takes_the_command_from_there() -> None:
    spelled = re.compile(r"pip install.*graphrun|graphrun\[")
    texts: dict[str, Any] = {
        path.name: path.read_text() for path in (ROOT / "graphrun").rglob("*.py")
    }
    assert [name for name, text in texts.items() if spelled.search(text)] == ["extras.py"]
