"""Sources: revisions of repositories in the hub's cache, variants of files, shards, and files that
are ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

import graphrun
from graphrun.errors import GraphError, PlanError
from graphrun.graph.graph import Graph
from graphrun.modules.build import build, draft, meta_module
from graphrun.modules.source_files import commit_of, local_place, split_source, stored_tensors
from graphrun.modules.stored import holding

GRAPHS = Path(__file__).parents[2] / "graphs"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def flux() -> Graph:
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture
def hub(flux: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with two commits of a repository that has a tiny FLUX VAE; main and the tag v2
    point to the second."""
    root = tmp_path / "hub" / "models--somebody--tiny"
    vae = build(flux.component("vae"), flux)
    for commit, factor in ((OLD, 1.0), (NEW, 2.0)):
        with torch.no_grad():
            vae.get_parameter("decoder.conv_in.bias").mul_(factor)
        vae.save_pretrained(root / "snapshots" / commit / "vae")  # type: ignore[operator]
    for name, commit in (("main", NEW), ("v2", NEW), ("refs/pr/1", OLD)):
        (root / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "refs" / name).write_text(commit)
    blob = root / "blobs" / ("c" * 64)
    blob.parent.mkdir()
    file = root / "snapshots" / NEW / "vae" / "diffusion_pytorch_model.safetensors"
    file.rename(blob)
    file.symlink_to(blob)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return root


def with_vae(flux: Graph, source: str, **changes: Any) -> Graph:
    return replace(
        flux,
        components={
            **flux.components,
            "vae": replace(flux.component("vae"), source=source, **changes),
        },
    )


@pytest.mark.parametrize(
    ("source", "commit"),
    [
        ("somebody/tiny/vae", NEW),
        ("somebody/tiny@main/vae", NEW),
        ("somebody/tiny@v2/vae", NEW),
        (f"somebody/tiny@{OLD}/vae", OLD),
        ("somebody/tiny@refs%2Fpr%2F1/vae", OLD),
        ("somebody/tiny@v3/vae", ""),
        ("somebody/other/vae", ""),
    ],
)
def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Path, source: str, commit: str) -> None:
    assert commit_of(source) == commit
    place = local_place(source)
    assert place == (hub / "snapshots" / commit / "vae" if commit else None)
    assert split_source(source)[2] == "vae"


@pytest.mark.parametrize(
    ("lines", "source"),
    [
        ("source: somebody/tiny@v2", "somebody/tiny@v2/vae"),
        ("source: somebody/tiny\nrevision: v2", "somebody/tiny@v2/vae"),
        ("source: somebody/tiny\nrevision: refs/pr/1", "somebody/tiny@refs%2Fpr%2F1/vae"),
    ],
)
def test_a_graph_may_name_the_revision_in_source_or_beside_it(
    tmp_path: Path, lines: str, source: str
) -> None:
    text = (
        (GRAPHS / "flux-tiny.yaml")
        .read_text()
        .replace("name: flux-tiny", f"name: flux-tiny\n{lines}")
    )
    path = tmp_path / "graph.yaml"
    path.write_text(
        text.replace("configs/", f"{GRAPHS}/configs/").replace(
            "tokenizers/", f"{GRAPHS}/tokenizers/"
        )
    )
    assert graphrun.load(path).component("vae").source == source


@pytest.mark.parametrize(
    ("prefix", "source"),
    [("org/other@v1", "org/other@v1/vae"), ("./here", "{0}/here/vae"), ("here", "{0}/here/vae")],
)
def test_a_given_source_takes_the_place_of_the_graphs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, source: str
) -> None:
    """With its revision; a path is relative to the current folder, not to the graph's. A
    component's own source stays."""
    (tmp_path / "here").mkdir()
    (tmp_path / "graphs").mkdir()
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "graphs" / "graph.yaml"
    text = (
        (GRAPHS / "flux-tiny.yaml")
        .read_text()
        .replace("name: flux-tiny", "name: flux-tiny\nsource: some/body\nrevision: v2")
    )
    text = text.replace(
        "diffusers.FluxTransformer2DModel,",
        "diffusers.FluxTransformer2DModel, source: its/own/folder,",
    )
    path.write_text(
        text.replace("configs/", f"{GRAPHS}/configs/").replace(
            "tokenizers/", f"{GRAPHS}/tokenizers/"
        )
    )
    graph = graphrun.load(path, source=prefix)
    assert graph.component("vae").source == source.format(tmp_path)
    assert graph.component("transformer").source == "its/own/folder"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "source: ./here\nrevision: v2",
            "source: {0}/here is on this machine, and only a repository",
        ),
        (
            "source: somebody/tiny@v1\nrevision: v2",
            "source: has a revision of its own: leave revision: out",
        ),
        (
            "source: model.ckpt",
            "source: is pickled, and nothing is unpickled: convert it to safetensors",
        ),
    ],
)
def test_an_invalid_source_is_refused_with_its_line(
    tmp_path: Path, lines: str, message: str
) -> None:
    path = tmp_path / "graph.yaml"
    text = (
        (GRAPHS / "flux-tiny.yaml")
        .read_text()
        .replace("name: flux-tiny", f"name: flux-tiny\n{lines}")
    )
    path.write_text(
        text.replace("configs/", f"{GRAPHS}/configs/").replace(
            "tokenizers/", f"{GRAPHS}/tokenizers/"
        )
    )
    with pytest.raises(GraphError) as error_info:
        graphrun.load(path)
    assert message.format(tmp_path) in str(error_info.value)
    assert str(error_info.value).startswith(f"{path}:5: ")


@pytest.mark.sweep("more")
def test_plan_and_trace_name_the_commit_and_the_trace_the_files(flux: Graph, hub: Path) -> None:
    arguments: dict[str, Any] = {
        "vram": "16M",
        "ram": "1G",
        "hardware": "sim",
        "inputs": {"steps": 1},
    }
    graph = with_vae(flux, "somebody/tiny/vae")
    solution = graphrun.plan(graphrun.estimate(graph, **arguments))
    assert solution.problem.commits == (("somebody/tiny", NEW),)
    trace = graphrun.run(solution, graph, {"steps": 1})
    (origin,) = trace.sources
    status = (hub / "blobs" / ("c" * 64)).stat()
    name = "diffusion_pytorch_model.safetensors"
    assert origin == {
        "component": "vae",
        "source": "somebody/tiny/vae",
        "commit": NEW,
        "files": [
            {
                "name": name,
                "bytes": status.st_size,
                "mtime_ns": status.st_mtime_ns,
                "sha256": "c" * 64,
            }
        ],
    }
    assert json.loads(json.dumps(trace.to_json()))["sources"] == [origin]
    assert graphrun.estimate(flux, **arguments).commits == ()


@pytest.mark.sweep("more")
def test_a_plan_is_refused_at_another_commit(flux: Graph, hub: Path) -> None:
    arguments: dict[str, Any] = {
        "vram": "16M",
        "ram": "1G",
        "hardware": "sim",
        "inputs": {"steps": 1},
    }
    graph, pinned = with_vae(flux, "somebody/tiny/vae"), with_vae(flux, f"somebody/tiny@{NEW}/vae")
    moving, fixed = (
        graphrun.plan(graphrun.estimate(variant, **arguments)) for variant in (graph, pinned)
    )
    (hub / "refs" / "main").write_text(OLD)
    with pytest.raises(PlanError) as error_info:
        graphrun.run(moving, graph, {"steps": 1})
    assert str(error_info.value) == (
        f"the plan was made at commit {NEW} of somebody/tiny, which is at {OLD} now: plan again, "
        "or name the commit, as in "
        f"source: somebody/tiny@{NEW}"
    )
    assert graphrun.run(fixed, pinned, {"steps": 1}).sources[0]["commit"] == NEW
    assert graphrun.run(moving, graph, {"steps": 1}, random_weights=True).sources == ()
    assert graphrun.estimate(graph, **arguments).digest != moving.problem.digest


@pytest.fixture
def variants(flux: Graph, tmp_path: Path) -> Callable[..., Path]:
    """The folder of a tiny FLUX transformer, in fp32 and as variant fp16, each whole or in
    shards."""

    def make(**tensors: Any) -> Path:
        folder = tmp_path / "transformer"
        build(replace(flux.component("transformer"), dtype="float32"), flux).save_pretrained(folder)  # type: ignore[operator]
        half = build(flux.component("transformer"), flux).to(torch.float16)
        half.save_pretrained(folder, variant="fp16", **tensors)  # type: ignore[operator]
        return folder

    return make


@pytest.mark.sweep("more")
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "4MB"}])
def test_a_variant_is_read_only_where_it_is_named(
    flux: Graph, variants: Callable[..., Path], shards: dict[str, str]
) -> None:
    folder = variants(**shards)
    plain, half = (
        {Path(tensor.file).name for tensor in stored_tensors(folder, "", name)}
        for name in ("", "fp16")
    )
    assert plain == {"diffusion_pytorch_model.safetensors"}
    assert len(half) == (3 if shards else 1)
    assert all("fp16" in name for name in half)
    assert {tensor.dtype for tensor in stored_tensors(folder, "")} == {"float32"}
    assert {tensor.dtype for tensor in stored_tensors(folder, "", "fp16")} == {"float16"}
    component = replace(
        flux.component("transformer"), source=str(folder), dtype="float16", variant="fp16"
    )
    files = holding(component, meta_module(component, flux.trust))
    assert files is not None
    assert (files.absent_count, dict(files.dtypes).keys()) == (0, {"float16"})
    module, (_, writer) = build(component, flux), draft(component, flux, "float16")
    value = torch.empty_like(module.get_parameter("proj_out.weight"))
    writer.source.read_into("proj_out.weight", value)
    assert torch.equal(value, module.get_parameter("proj_out.weight"))


def test_the_error_for_a_missing_variant_names_the_others(
    flux: Graph, variants: Callable[..., Path]
) -> None:
    folder = variants()
    with pytest.raises(
        GraphError,
        match=(
            "no safetensors of variant bf16 in .*; it has files of no variant, variant: fp16: set "
            "variant:"
        ),
    ):
        stored_tensors(folder, "graph.yaml:3", "bf16")
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(GraphError, match="it has files of variant: fp16: set variant:"):
        stored_tensors(folder, "graph.yaml:3")


def test_a_missing_shard_of_a_variant_is_named(variants: Callable[..., Path]) -> None:
    folder = variants(max_shard_size="4MB")
    shard = next(iter(sorted(folder.glob("*fp16-00002*"))))
    shard.unlink()
    with pytest.raises(GraphError, match=f"{shard} is missing; download it again"):
        stored_tensors(folder, "graph.yaml:3", "fp16")


def test_components_inherit_the_graphs_variant_unless_they_have_their_own_source(
    tmp_path: Path,
) -> None:
    text = (
        (GRAPHS / "flux-tiny.yaml")
        .read_text()
        .replace("name: flux-tiny", "name: flux-tiny\nsource: ./here\nvariant: fp16")
    )
    text = text.replace("flux-vae.json", "flux-vae.json, source: ./there")
    path = tmp_path / "graph.yaml"
    path.write_text(
        text.replace("configs/", f"{GRAPHS}/configs/").replace(
            "tokenizers/", f"{GRAPHS}/tokenizers/"
        )
    )
    graph = graphrun.load(path)
    assert (graph.component("transformer").variant, graph.component("vae").variant) == ("fp16", "")


def test_pickle_files_beside_safetensors_are_ignored(flux: Graph, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert {tensor.file for tensor in stored_tensors(tmp_path, "")} == {
        str(tmp_path / "model.safetensors")
    }
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        GraphError, match="only pytorch_model.bin: nothing is unpickled; convert it to safetensors"
    ):
        stored_tensors(tmp_path, "")
