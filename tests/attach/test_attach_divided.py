"""Two processes that divide the sequence of a transformer by diffusers' context parallelism, each
with an attached pipeline: diffusers' bits, within the plan, with the planned transfers."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from saved_pipelines import as_passed, load, save
from test_attach_pipelines import arrays, equal
from tiny_pipelines import cases
from torch.utils._python_dispatch import TorchDispatchMode

import graphrun
from graphrun.errors import StageError
from graphrun.modules.build import build
from graphrun.profile.dry_run import probe

pytestmark = pytest.mark.long
PROCESSES = 2
SECONDS = 120


class SentBytes(TorchDispatchMode):
    """Bytes that this process sends to the other one while real tensors are exchanged."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_to_all" in func.name():
            self.nbytes += args[0].nbytes // 2  # the first or second half stays
        elif "all_gather" in func.name():
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


@contextmanager
def process_group(folder: Path, rank: int) -> Iterator[None]:
    store = dist.FileStore(str(folder / "group"), PROCESSES)
    seconds = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=seconds)
    try:
        yield
    finally:
        dist.destroy_process_group()


def divide(module: Any) -> None:
    # diffusers divides by the number of accelerators, which is 0 on a CPU
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_count", lambda: 1)
        module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=PROCESSES))


def divided_calls(name: str, folder: Path, rank: int) -> dict[str, Any]:
    """Call the saved pipeline undivided, divided by diffusers alone, and attached."""
    case = cases()[name]
    pipe = load(case, folder / "pipe")
    with process_group(folder, rank):
        plain = case.call(pipe, as_passed)
        divide(pipe.transformer)
        with SentBytes() as counter:
            want = case.call(pipe, as_passed)
        with graphrun.attach(pipe, device="cpu", memory="8G") as attachment:
            outputs = [case.call(pipe, as_passed) for _ in range(2)]
            trace, replans = attachment.trace, attachment.replans
            (run, _), *_ = attachment._dry_runs.values()
        assert trace is not None
        return {
            "are equal": all(equal(output, want) for output in outputs),
            "difference": max(
                float(np.abs(a.astype(float) - b.astype(float)).max())
                for a, b in zip(arrays(plain), arrays(want), strict=True)
            ),
            "deviations": (replans, trace.overruns),
            "sent": counter.nbytes,
            "planned": sum(
                kernel.nbytes for _, call in run.recording.entries() for kernel in call.transfers
            ),
        }


def in_two_processes(work: Any, *arguments: Any) -> list[dict[str, Any]]:
    """Return what ``work`` returns in each of two forked processes."""
    context, pipes, children = get_context("fork"), [], []

    def run(rank: int, connection: Connection) -> None:
        try:
            connection.send(work(*arguments, rank))
        except BaseException:  # noqa: BLE001 (the test shows it)
            connection.send({"error": traceback.format_exc()})

    for rank in range(PROCESSES):
        receiver, sender = context.Pipe(duplex=False)
        children.append(context.Process(target=run, args=(rank, sender)))
        pipes.append(receiver)
        children[-1].start()
    try:
        return [
            receiver.recv() if receiver.poll(SECONDS) else {"error": "no answer"}
            for receiver in pipes
        ]
    finally:
        for child in children:
            child.kill()
            child.join()


def sent_by_flux(folder: Path, rank: int) -> dict[str, Any]:
    """Call the transformer of flux-tiny, divided by diffusers alone, with its default sizes."""
    graph = graphrun.load("flux-tiny")
    transformer = build(graph.components["transformer"], graph)
    hidden_states = torch.zeros(1, 64, transformer.config.in_channels, dtype=torch.bfloat16)
    text_states = torch.zeros(1, 64, transformer.config.joint_attention_dim, dtype=torch.bfloat16)
    pooled = torch.zeros(1, transformer.config.pooled_projection_dim, dtype=torch.bfloat16)
    with process_group(folder, rank):
        divide(transformer)
        with torch.no_grad(), SentBytes() as counter:
            transformer(
                hidden_states=hidden_states,
                encoder_hidden_states=text_states,
                pooled_projections=pooled,
                timestep=torch.ones(1, dtype=torch.bfloat16),
                img_ids=torch.zeros(64, 3),
                txt_ids=torch.zeros(64, 3),
                guidance=torch.ones(1) if transformer.config.guidance_embeds else None,
                return_dict=False,
            )
    return {"sent": counter.nbytes}


@pytest.mark.sweep("more")
def test_a_graph_is_planned_with_the_bytes_that_two_processes_exchange(
    dry: Any, tmp_path: Path
) -> None:
    graph, whole_run, inputs = dry("flux-tiny")
    divided_run = probe(graph.divided(PROCESSES), inputs)
    results = in_two_processes(sent_by_flux, tmp_path)
    whole_call, divided_call = (
        next(call for _, call in run.recording.entries() if call.component == "transformer")
        for run in (whole_run, divided_run)
    )
    planned_bytes = sum(kernel.nbytes for kernel in divided_call.transfers)
    assert results == [{"sent": planned_bytes}] * PROCESSES
    assert whole_call.transfers == []
    assert 0.45 < divided_call.flops / whole_call.flops < 0.55
    assert 0.45 < divided_call.peak_bytes / whole_call.peak_bytes < 0.55
    assert not dist.is_initialized()


def test_a_call_that_would_send_tensors_is_not_computed_in_a_dry_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = list[str]()
    monkeypatch.setattr("graphrun.profile.dry_run.build", lambda part, _: built.append(part.name))
    graph = graphrun.load("flux-tiny").divided(PROCESSES)
    with pytest.raises(StageError, match="divisible by mesh size"):
        probe(graph, graph.for_planning({"max_sequence_length": 63}))
    assert built == []
    assert not dist.is_initialized()


@pytest.mark.sweep("more")
def test_a_mask_for_all_heads_cannot_be_divided() -> None:
    """diffusers divides the heads, and not the mask that LTX repeats for each of them."""
    graph = graphrun.load("ltx-tiny").divided(PROCESSES)
    with pytest.raises(StageError, match="Attempting to broadcast"):
        probe(graph, graph.for_planning({}))


@pytest.mark.sweep("more")
@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline"])
def test_each_process_has_diffusers_bits_and_sends_the_planned_bytes(
    name: str, tmp_path: Path
) -> None:
    save(cases()[name], tmp_path / "pipe")
    results = in_two_processes(divided_calls, name, tmp_path)
    for result in results:
        assert "error" not in result, result["error"]
        assert result["are equal"]
        assert result["deviations"] == ((), ())
        assert result["planned"] == result["sent"] > 0
    assert 0 <= results[0]["difference"] < 1e-5
    assert results[0]["sent"] == results[1]["sent"]
