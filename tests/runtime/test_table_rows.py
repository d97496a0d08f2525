"""An encoder's large embedding table on the CPU: it stays in its file, and rows are read when they
are looked up. The outputs have the bits of the library's own pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_component import nothing_left
from test_cpu_graphs import AMPLE, equal, resident, run
from test_reference_calls import small
from torch import nn

import graphrun
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.model.hardware import Hardware
from graphrun.model.problem import ComponentNumbers, Problem, ProblemLimits
from graphrun.modules.build import build
from graphrun.modules.source_files import stored_tensors
from graphrun.profile.dry_run import Prober, probe
from graphrun.profile.hardware import hardware
from graphrun.profile.problems import problem_of
from graphrun.profile.processor import cpu_estimate
from graphrun.profile.recording import DryRun
from graphrun.profile.tables import tables_of
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.table_rows import TableRows
from graphrun.solve.infeasible import smallest_budget

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
ROWS, WIDTH = 150_000, 64
TABLE_BYTES = 2 * ROWS * WIDTH  # in bf16
TABLE = "shared.weight"


def graph_in(folder: Path, source: str = "") -> Graph:
    """A tiny Wan whose encoder has a table of 18 MiB, with weights from ``source``, or random."""
    config = json.loads((GRAPHS / "configs" / "tiny-umt5.json").read_text())
    (folder / "umt5.json").write_text(json.dumps(config | {"vocab_size": ROWS}))
    text = (GRAPHS / "wan-tiny.yaml").read_text()
    text = text.replace("configs/", f"{GRAPHS}/configs/").replace(
        "tokenizers/", f"{GRAPHS}/tokenizers/"
    )
    text = text.replace(
        f"config: {GRAPHS}/configs/tiny-umt5.json",
        f"config: {folder}/umt5.json" + (f", source: {source}" if source else ""),
    )
    (folder / "graph.yaml").write_text(text)
    return graphrun.load(folder / "graph.yaml")


def saved(folder: Path, dtype: torch.dtype) -> str:
    """A folder with weights of the encoder in ``dtype``."""
    encoder: Any = build(graph_in(folder).components["text_encoder"], graph_in(folder))
    encoder.to(dtype).save_pretrained(folder / "encoder")
    return str(folder / "encoder")


def problem_on(
    device: Hardware, graph: Graph, dry_run: DryRun, inputs: Mapping[str, Any]
) -> Problem:
    return problem_of(graph, dry_run, device, ProblemLimits(AMPLE, AMPLE), inputs)


def encoder_of(problem: Problem) -> ComponentNumbers:
    return problem.component("text_encoder")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_the_output_is_the_pipelines_own_in_less_memory(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    """Without files, from files of the same dtype, and from files of another one."""
    graph = graph_in(tmp_path, saved(tmp_path, dtype) if dtype else "")
    inputs = small(graph)
    planned_for, values = graph.for_planning(inputs), graph.resolve(inputs)
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    expected = resident(graph, modules, values)
    del modules
    dry_run = probe(graph, planned_for)
    context_bytes = CpuDevice(cpu_estimate()).measured_context(to_plan=True)
    cpu = replace(cpu_estimate(), context_bytes=context_bytes)
    ample = problem_on(cpu, graph, dry_run, planned_for)
    whole = problem_on(cpu, graph, _without_tables(dry_run), planned_for)
    smallest_bytes = smallest_budget(ample)
    encoder_bytes = [sum(encoder_of(p).variants[0].block_bytes) for p in (whole, ample)]
    assert encoder_bytes[0] - encoder_bytes[1] > 0.9 * TABLE_BYTES
    with nothing_left():
        for problem in (ample, ample.with_budget(smallest_bytes)):
            assert [v.tables for v in encoder_of(problem).variants] == [(TABLE,)]
            trace = run(problem, graph, values)
            assert all(equal(value, expected[name]) for name, value in trace.outputs.items())
            assert trace.outputs.keys() == expected.keys()
            assert trace.peak_bytes <= problem.effective_bytes


def _without_tables(dry_run: DryRun) -> DryRun:
    profiles = {
        name: replace(
            profile,
            without_tables={},
            layer_split=profile.layer_split and replace(profile.layer_split, without_tables={}),
        )
        for name, profile in dry_run.profiles.items()
    }
    return replace(dry_run, profiles=profiles)


def test_a_card_gets_the_whole_table(tmp_path: Path) -> None:
    graph = graph_in(tmp_path)
    planned_for = graph.for_planning(small(graph))
    dry_run = probe(graph, planned_for)
    on_card = encoder_of(problem_on(hardware("sim"), graph, dry_run, planned_for)).variants[0]
    on_cpu = encoder_of(problem_on(cpu_estimate(), graph, dry_run, planned_for)).variants[0]
    assert not on_card.tables
    assert on_card.block_bytes[0] - on_cpu.block_bytes[0] > 0.9 * TABLE_BYTES


class Scaled(nn.Embedding):
    """An embedding with a factor, as Gemma has."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.factor


class Tied(nn.Module):
    """Looks up rows of a table and, if ``is_tied``, multiplies by all of it, as language models."""

    def __init__(self, rows: int, *, is_tied: bool) -> None:
        super().__init__()
        self.table, self.norm = Scaled(rows, 256), nn.LayerNorm(256)
        self.is_tied = is_tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.norm(self.table(tokens))
        return values @ self.table.weight.T if self.is_tied else values


@pytest.mark.parametrize(
    ("rows", "tokens", "is_tied", "tables"),
    [
        (40_000, 64, False, ("table.weight",)),
        (40_000, 64, True, ()),  # a product reads all of it
        (40_000, 20_000, False, ()),  # half of the rows
        (4_000, 64, False, ()),  # 4 MB
    ],
)
def test_which_tables_stay_in_their_files(
    rows: int, tokens: int, is_tied: bool, tables: tuple[str, ...]
) -> None:
    with torch.device("meta"):
        module = Tied(rows, is_tied=is_tied)
    prober = Prober({"encoder": module})
    numbers = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    call, _ = prober.trace("encoder", "forward", module.forward, (numbers,), {})
    assert call.table_rows == {"table.weight": 0 if is_tied else tokens}
    assert tables_of(module, [call]) == tables
    assert tables_of(module, []) == ()


@pytest.fixture
def rows(tmp_path: Path) -> Any:
    """A table of which the file has other numbers in each row, and its file."""
    graph = graph_in(tmp_path, saved(tmp_path, torch.float32))
    (file,) = Path(graph.components["text_encoder"].source or "").glob("*.safetensors")
    (file_tensor,) = (t for t in stored_tensors(file, "") if t.name == TABLE)
    return TableRows.of(file_tensor, nn.Parameter(torch.empty(ROWS, WIDTH, device="meta"))), file


def test_a_lookup_has_the_bits_of_the_whole_table(rows: Any) -> None:
    table, _ = rows
    whole = table + 0.0
    assert type(whole) is torch.Tensor
    embedding = nn.Embedding(ROWS, WIDTH, padding_idx=ROWS - 1, device="meta")
    embedding._parameters["weight"] = table
    tokens = torch.tensor([[5, 7, 7, ROWS - 1], [0, 6, 5, 149_000]])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(embedding(tokens), whole[tokens])
            assert torch.equal(embedding(tokens[:, :0]), whole[tokens[:, :0]])
    assert (table.dtype, table.shape, table.device.type) == (torch.float32, whole.shape, "cpu")
    assert table.untyped_storage().nbytes() == 0
    with pytest.raises(IndexError, match="row 150000 of a table of 150000 rows"):
        embedding(torch.tensor([ROWS]))


def test_an_error_of_the_file_is_one_sentence(rows: Any) -> None:
    table, file = rows
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(InputError, match="was changed while it was in use"):
        nn.functional.embedding(torch.tensor([ROWS - 1]), table)
    file.unlink()
    with pytest.raises(InputError, match="can no longer be opened"):
        nn.functional.embedding(torch.tensor([ROWS - 1]), table)
