"""Every command and every snippet of the pages runs; the pages that come from the code are as the
code is.

Commands run as printed, in an empty folder with ``graphs``, ``examples`` and ``benchmarks`` of the
checkout. Python runs as printed too, but for two things that a machine without a card lacks: where
no device is named it is the simulated accelerator, and FLUX.1-dev is the small one. ``SETUP`` has
what a page takes for granted.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from campaign import sampled
from documents import PAGES, ROOT, STANDINS, Block, blocks, parts, quoted
from pydantic import TypeAdapter

from graphrun.graph.schema import GraphSpec
from graphrun.serve.metrics import Metrics

LANGUAGES = {"sh", "python", "yaml", "text", "powershell"}
SAMPLE = ["docs/repeating.md"]
TINY = (
    "import sys; sys.path.insert(0, 'examples')\nimport graphrun\nfrom tiny_flux import tiny_flux\n"
)
SETUP = {
    "README.md": TINY + "pipe = tiny_flux()\n",
    "docs/attaching.md": TINY + "pipe = tiny_flux()\n",
    "docs/repeating.md": "import graphrun\ngraph = "
    "graphrun.load('flux-tiny')\nprompts = ['a cat', 'a "
    "dog']\n",
}


@pytest.fixture(scope="module")
def pages() -> Any:
    """The module docs/pages.py."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_pages_and_drawings_are_those_of_the_code(pages: Any) -> None:
    """Update with ``make docs``."""
    for name, make in (pages.PAGES | pages.DRAWINGS).items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == make(), (
            f"docs/{name} is older than the code: make docs"
        )


def test_every_page_is_in_the_site() -> None:
    site_pages = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(site_pages) == sorted(
        page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")
    )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    text = re.sub(
        r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL
    )
    links = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if link]
    targets = {link: (ROOT / page).parent.joinpath(link).resolve() for link in links}
    site = ROOT / "docs" if page.startswith("docs/") else ROOT  # pages of the site have no others
    assert [
        link for link, path in targets.items() if not path.exists() or not path.is_relative_to(site)
    ] == []


def used(page: str) -> Iterator[tuple[str, list[str]]]:
    """Every command of graphrun and make on ``page``, with its words."""
    lines = [line for block in blocks(page) if block.language == "sh" for line in block.commands]
    lines += [
        line
        for block in blocks(page)
        if block.language == "yaml"
        for line in re.findall(r"graphrun (?:plan|check|diff) .*", block.text)
    ]
    for line in [*lines, *quoted(page)]:
        for words in parts(line):
            name = Path(words[0]).name if words else ""
            if name in ("graphrun", "make"):
                yield line, [name, *words[1:]]


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page: str) -> None:
    from graphrun.cli import main

    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    for line, words in used(page):
        if words[0] == "make":
            assert set(word for word in words[1:] if "=" not in word) <= set(targets[1].split()), (
                line
            )
            continue
        command: Any = typer.main.get_command(main.app)
        options = {"--help", "-h"}
        for word in words[1:]:
            options |= {
                name
                for parameter in command.params
                for name in (*parameter.opts, *parameter.secondary_opts)
            }
            if word.startswith("-") and not re.fullmatch(r"-?\d.*", word):
                assert word.partition("=")[0] in options, f"{page}: {line}: {word}"
            elif hasattr(command, "commands") and not word.isupper():
                assert word in command.commands, f"{page}: {line}: {word}"
                command = command.commands[word]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_known_kind(page: str) -> None:
    """Drawings and output have no language; what looks like a command is marked as one."""
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{page}:{block.line}: {block.language}"
        if block.language == "text":
            assert not re.search(r"^(graphrun|make|python|pip) ", block.text, re.MULTILINE), (
                f"{page}:{block.line}"
            )
        if block.language == "yaml":
            data = yaml.safe_load(block.text)
            for key, value in data.items():
                if (field := GraphSpec.model_fields.get(key)) and "jobs" not in data:
                    TypeAdapter(field.annotation).validate_python(value)


def runnable(page: str) -> list[Block]:
    return [
        block
        for block in blocks(page)
        if not block.not_run and (block.language in ("sh", "python") or block.file)
    ]


@pytest.mark.parametrize(
    "page",
    sampled([page for page in PAGES if runnable(page) and page != "README.md"], SAMPLE, "docs"),
)
def test_the_page_runs_as_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(page, runnable(page), tmp_path, monkeypatch)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands: tests/installed/test_wheel.py."""
    run_page(
        "README.md",
        [block for block in runnable("README.md") if block.language == "python"],
        tmp_path,
        monkeypatch,
    )


def run_page(page: str, run: list[Block], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the blocks in order in ``folder``."""
    from graphrun.profile import hardware

    for name in ("graphs", "examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hardware, "detect_card", hardware.simulated)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    names: dict[str, Any] = {"__name__": "page"}
    if any(block.language == "python" for block in run):
        exec(SETUP.get(page, ""), names)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    printed: list[str] = []
    for block in run:
        place = f"{page}:{block.line}"
        if block.file == "prints":
            assert [
                line for line in block.text.splitlines() if line.rstrip() not in printed
            ] == [], place
        elif block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            text = block.text
            for word, stand_in in STANDINS.items():
                text = text.replace(word, stand_in)
            exec(compile("\n" * (block.line - 1) + text, str(ROOT / page), "exec"), names)
        for number, line in enumerate(block.commands if block.language == "sh" else ()):
            process = subprocess.run(
                ["bash", "-c", line], env=environment, capture_output=True, text=True
            )
            printed = [line_printed.rstrip() for line_printed in process.stdout.splitlines()]
            assert "Traceback" not in process.stderr, f"{place}: {line}\n{process.stderr}"
            if block.fails and number == len(block.commands) - 1:
                assert process.returncode != 0, f"{place}: {line}"
                assert block.fails in process.stderr, f"{place}: {line}\n{process.stderr}"
            else:
                assert process.returncode == 0, f"{place}: {line}\n{process.stderr}"


def test_metrics_that_the_page_of_the_server_names_exist() -> None:
    """Of /metrics, also those that an example scales by."""
    names = set(re.findall(r"\bgraphrun_[a-z_]+", (ROOT / "docs" / "serving.md").read_text()))
    families = {family.name for family in Metrics().registry.collect()}
    assert "graphrun_waiting_seconds" in names
    assert {name.removesuffix("_total") for name in names} <= families
