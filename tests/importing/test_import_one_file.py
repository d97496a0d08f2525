"""Import of checkpoints in one file and GGUF transformers: their components are found, the others
come from another source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import original_layouts as layouts
import pytest
import torch
from huggingface_hub import constants
from import_whole import of_graph, saved
from safetensors.torch import save_file

import graphrun
from graphrun.diffusers_.importing.imported import ImportOptions, import_source
from graphrun.errors import GraphError, InputError
from graphrun.modules.build import build, meta_module
from graphrun.modules.stored import holding

Cli = Callable[..., tuple[int, str, str]]
GRAPHS = Path(__file__).parents[2] / "graphs"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def bare(folder: Path) -> Path:
    """``folder`` without weights."""
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    return folder


def cached(folder: Path, repository: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts ``folder`` into the hub's cache as ``repository``."""
    root = cache / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, root / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX as a folder without weights."""
    return bare(of_graph("flux-tiny", tmp_path_factory.mktemp("flux")).folder)


@pytest.fixture(scope="module")
def transformer() -> dict[str, torch.Tensor]:
    """Its transformer's tensors, named as in FLUX's original checkpoint."""
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    shapes = layouts.flux_shapes(graph.component("transformer").config)
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def test_a_checkpoint_is_imported_with_the_configurations_of_a_folder(tmp_path: Path) -> None:
    source = of_graph("sdxl-tiny", tmp_path)
    state = {
        name: dict(module.state_dict())
        for name, module in source.pipe.components.items()
        if hasattr(module, "state_dict")
    }
    original = {
        **layouts.clip(state["text_encoder"]),
        **layouts.open_clip(state["text_encoder_2"]),
        **layouts.unet(state["unet"], 1),
        **layouts.vae(state["vae"]),
    }
    save_file(
        {name: tensor.contiguous() for name, tensor in original.items()},
        tmp_path / "sdxl.safetensors",
    )
    bare(source.folder)
    options = ImportOptions(
        {"": str(source.folder)}, {}, input_defaults={"height": 64, "width": 64}, whole=True
    )
    graph = import_source(str(tmp_path / "sdxl.safetensors"), options).write(
        tmp_path / "graph.yaml"
    )
    assert {component.source for component in graph.components.values()} == {
        str(tmp_path / "sdxl.safetensors")
    }
    assert len(graph.components) == 4
    text = (tmp_path / "graph.yaml").read_text()
    assert "# The file has text_encoder, text_encoder_2, unet, vae." in text
    assert "source: ./sdxl.safetensors" in text
    assert graph.parts["tokenizer"].source == str(source.folder / "tokenizer")
    unet = build(graph.component("unet"), graph).state_dict()
    assert all(torch.equal(tensor, unet[name]) for name, tensor in state["unet"].items())


def test_a_transformer_in_one_file_is_known_by_its_tensors(
    flux: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other components come from the repository in diffusers' table, here from the hub's cache.
    FLUX at its real width, which diffusers' conversion needs, and two layers deep."""
    folder = Path(shutil.copytree(flux, tmp_path / "wide"))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    config |= {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "axes_dims_rope": [16, 56, 56],
        "guidance_embeds": True,
    }
    config |= {"num_layers": 1, "num_single_layers": 1}
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    cached(folder, "black-forest-labs/FLUX.1-dev", tmp_path / "cache", monkeypatch)
    file = tmp_path / "flux1-dev.safetensors"
    nbytes = layouts.write_hollow(file, layouts.flux_shapes(config))
    graph = import_source(
        str(file), ImportOptions({}, {}, input_defaults={"height": 64, "width": 64}, whole=True)
    ).write(tmp_path / "out" / "graph.yaml")
    component = graph.component("transformer")
    assert (component.source, component.precision, component.dtype) == (
        str(file),
        ("bfloat16",),
        "bfloat16",
    )
    assert component.config["num_attention_heads"] == 24
    assert graph.component("vae").source == "black-forest-labs/FLUX.1-dev/vae"
    text = (tmp_path / "out" / "graph.yaml").read_text()
    assert (
        "# The file has transformer; text_encoder, text_encoder_2, vae: of "
        "black-forest-labs/FLUX.1-dev." in text
    )
    assert "source: ../flux1-dev.safetensors" in text
    holds = holding(component, meta_module(component, graph.trust))
    assert holds is not None
    assert (holds.used_bytes, holds.absent_count) == (nbytes, 0)


def test_a_gguf_transformer_becomes_a_precision_of_its_component(
    flux: Path, tmp_path: Path
) -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    state = dict(build(graph.component("transformer"), graph).state_dict())
    file = layouts.write_gguf(tmp_path / "flux-Q8.gguf", state, layouts.by_role)
    graph_import = import_source(
        str(file),
        ImportOptions({"": str(flux)}, {}, input_defaults={"height": 64, "width": 64}, whole=True),
    )
    graph = graph_import.write(tmp_path / "out" / "graph.yaml")
    transformer = graph.component("transformer")
    assert (transformer.gguf, transformer.precision, transformer.dtype) == (
        str(file),
        ("gguf",),
        "bfloat16",
    )
    assert transformer.source == str(flux / "transformer")
    assert "gguf: ../flux-Q8.gguf" in (tmp_path / "out" / "graph.yaml").read_text()
    problem = graphrun.estimate(graph, vram="1G", ram="1G", hardware="sim", inputs={"steps": 1})
    nbytes = {component.name: component.weight_bytes() for component in problem.components}[
        "transformer"
    ]
    assert 0 < nbytes < sum(tensor.nbytes for tensor in state.values())


def test_files_that_cannot_be_imported_say_why(
    graphrun: Cli, flux: Path, transformer: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    def refused(name: str, *options: str) -> str:
        code, stdout, err = graphrun("import", name, "-o", "graph.yaml", *options)
        assert (code, stdout) == (2, ""), err
        assert not Path("graph.yaml").exists()
        return err

    save_file(transformer, tmp_path / "flux.safetensors")
    message = refused("./flux.safetensors")
    assert (
        "has no configurations of its own: cannot get the configurations of "
        "black-forest-labs/FLUX.1-dev from the hub" in message
    )
    assert "--config FOLDER names a folder" in message
    assert "for a file it is --config FOLDER" in refused(
        "./flux.safetensors", "--config", "vae=x.json"
    )
    assert "no such file" in refused("./none.safetensors")
    save_file({"something": torch.zeros(2)}, tmp_path / "other.safetensors")
    assert "diffusers does not know which pipeline" in refused("./other.safetensors")
    message = refused("./other.safetensors", "--config", str(flux))
    assert "has no component of " in message
    assert "transformer: it is not a FluxTransformer2DModel" in message
    (tmp_path / "model.ckpt").touch()
    assert "nothing is unpickled" in refused("./model.ckpt")
    (tmp_path / "truncated.safetensors").write_bytes(
        (tmp_path / "flux.safetensors").read_bytes()[:-1]
    )
    assert "is truncated or corrupt" in refused("./truncated.safetensors", "--config", str(flux))


def test_a_file_of_another_size_than_its_configurations_is_refused(
    flux: Path, tmp_path: Path
) -> None:
    """Otherwise the file's component would be left out silently."""
    graph, file = graphrun.load(GRAPHS / "flux-tiny.yaml"), tmp_path / "flux.safetensors"
    state = dict(build(graph.component("transformer"), graph).state_dict())
    save_file({**state, "context_embedder.weight": torch.zeros(8, 8)}, file)
    with pytest.raises(
        GraphError, match=r"context_embedder.weight is \[8, 8\].*--config names the source"
    ):
        import_source(str(file), ImportOptions({"": str(flux)}, {}))
    save_file(
        {name: tensor for name, tensor in state.items() if name != "context_embedder.bias"}, file
    )
    with pytest.raises(GraphError, match="1 tensor is missing, such as context_embedder.bias"):
        import_source(str(file), ImportOptions({"": str(flux)}, {}))


def test_of_two_experts_a_file_may_be_either(tmp_path: Path) -> None:
    source = saved("WanPipeline-two-experts", tmp_path)
    save_file(dict(source.pipe.transformer.state_dict()), tmp_path / "wan.safetensors")
    with pytest.raises(
        InputError, match="may be transformer or transformer_2, which have one layout"
    ):
        import_source(
            str(tmp_path / "wan.safetensors"), ImportOptions({"": str(source.folder)}, {})
        )
