"""Directives in a graph file: what may be said, and what is refused with file and line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrun.errors import GraphError, InputError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Directives

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.fixture
def directed(tmp_path: Path) -> Callable[[str], Graph]:
    """flux-tiny.yaml with a ``directives:`` section of these lines."""

    def read(lines: str) -> Graph:
        shutil.copytree(GRAPHS, tmp_path / "graphs")
        path = tmp_path / "graphs/flux-tiny.yaml"
        path.write_text(f"{path.read_text()}\ndirectives:\n{lines}")
        return load(path)

    return read


def test_directives_are_read_and_do_not_change_what_the_graph_is(
    directed: Callable[[str], Graph],
) -> None:
    graph = directed("  keep: [vae]\n  exclude: [transformer, text_encoder_2]\n  reserve: 1.5M\n")
    assert graph.directives == Directives(("vae",), ("transformer", "text_encoder_2"), 3 * 2**19)
    assert graph.digest == load(GRAPHS / "flux-tiny.yaml").digest


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("  keep: [vea]\n", "unknown component 'vea'; did you mean 'vae'?"),
        ("  kep: [vae]\n", "unknown key 'kep'; did you mean 'keep'?"),
        ("  keep: vae\n", "expected a list, got 'vae'"),
        ("  keep: [vae]\n  exclude: [vae]\n", "'vae' is in keep too"),
        ("  reserve: much\n", "'much' is not a size"),
    ],
)
def test_a_wrong_directive_is_refused_with_its_line(
    directed: Callable[[str], Graph], lines: str, words: str
) -> None:
    with pytest.raises(GraphError) as error_info:
        directed(lines)
    text = (GRAPHS / "flux-tiny.yaml").read_text()
    line = text.count("\n") + 2 + lines.count("\n")
    assert words in str(error_info.value)
    assert f"flux-tiny.yaml:{line}: directives" in str(error_info.value)


def test_the_command_lines_directives_add_to_the_files_and_its_reserve_replaces_it(
    directed: Callable[[str], Graph],
) -> None:
    graph = directed("  keep: [vae]\n  reserve: 1M\n")
    assert graph.directed(["vae", "text_encoder"], ["transformer"]).directives == Directives(
        ("vae", "text_encoder"), ("transformer",), 2**20
    )
    assert graph.directed(reserve_bytes=0).directives.reserve_bytes == 0
    with pytest.raises(InputError, match="did you mean 'transformer'"):
        graph.directed(keep=["transfromer"])
    with pytest.raises(InputError, match="leave one of them out"):
        graph.directed(exclude=["vae"])
