"""Sources that cannot be imported: the error says what is wrong and what to do, and nothing is
written."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from import_whole import saved

from graphrun.graph.loading import load

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Stable Diffusion as a folder."""
    return saved("StableDiffusionPipeline", tmp_path_factory.mktemp("saved")).folder


@pytest.fixture
def pipeline_copy(pipeline: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may break."""
    return Path(shutil.copytree(pipeline, tmp_path / "broken" / "pipe"))


def index(folder: Path, **entries: object) -> Path:
    """Sets ``entries`` in the model_index of ``folder``, and returns the folder."""
    file = folder / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    return folder


def refused(cli: Cli, source: object, *options: str) -> str:
    """The error text of an import. Asserts that nothing is written."""
    previous_files = set(Path().iterdir())
    code, stdout, err = cli("import", str(source), "-o", "graph.yaml", *options)
    assert code == 2, err
    assert not stdout
    assert "Traceback" not in err
    assert set(Path().iterdir()) == previous_files
    return err


def test_invalid_sources(graphrun: Cli, pipeline: Path, tmp_path: Path) -> None:
    assert "no such folder: /nowhere" in refused(graphrun, "/nowhere")
    assert f"give the folder, {pipeline}" in refused(graphrun, pipeline / "model_index.json")
    (tmp_path / "empty").mkdir()
    assert "has no model_index.json" in refused(graphrun, tmp_path / "empty")
    assert "a component's folder: give the one above it" in refused(graphrun, pipeline / "unet")
    message = refused(graphrun, "owner/name")
    assert "cannot get the configurations of owner/name from the hub" in message
    assert "give a folder" in message
    assert "is not a folder, a hub id" in refused(graphrun, "what is this")


def test_folders_that_lack_something(graphrun: Cli, pipeline_copy: Path) -> None:
    (pipeline_copy / "unet" / "config.json").unlink()
    assert "unet has no config.json" in refused(graphrun, pipeline_copy)
    (pipeline_copy / "model_index.json").write_text("{")
    assert "not JSON" in refused(graphrun, pipeline_copy)


def test_code_that_comes_with_a_checkpoint_is_never_run(
    graphrun: Cli, pipeline_copy: Path, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w')\n"
    (pipeline_copy / "my_pipeline.py").write_text(code)
    assert "such code is never run" in refused(
        graphrun, index(pipeline_copy, _class_name=["my_pipeline", "MyPipeline"])
    )
    assert "is never run from a checkpoint" in refused(
        graphrun, index(pipeline_copy, _class_name="MyPipeline")
    )
    index(pipeline_copy, _class_name="StableDiffusionPipeline", unet=["my_unet", "MyUNet"])
    assert "never run" in refused(graphrun, pipeline_copy)
    index(pipeline_copy, unet=["diffusers", "UNet2DConditionModel"])
    (pipeline_copy / "unet" / "my_unet.py").write_text(code)
    assert "brings code of its own (my_unet.py)" in refused(graphrun, pipeline_copy)
    assert not ran.exists()


def test_classes_of_a_package_are_imported_where_the_caller_trusts_it(
    graphrun: Cli, pipeline_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mine.py").write_text(
        "import diffusers\nclass Own(diffusers.StableDiffusionPipeline):\n    pass\n"
        "class Net(diffusers.UNet2DConditionModel):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "lib")
    configs = [
        f"--config={name}={pipeline_copy / name / 'config.json'}"
        for name in ("unet", "vae", "text_encoder")
    ]
    small = ("--set", "height=16", "--set", "width=16", "--whole")
    assert "if you trust mine" in refused(graphrun, "mine.Own", *configs)
    index(pipeline_copy, _class_name="Own", unet=["mine", "Net"])
    assert "is never run from a checkpoint" in refused(graphrun, pipeline_copy)
    for number, arguments in enumerate((("mine.Own", *configs), (str(pipeline_copy),))):
        source, *options = arguments
        code, stdout, err = graphrun(
            "import", source, "-o", f"{number}.yaml", *options, *small, "--trust-package", "mine"
        )
        assert code == 0, err
        assert f"wrote {number}.yaml: mine.Own, 3 components" in stdout
        assert "allow: [diffusers, transformers, mine]" in Path(f"{number}.yaml").read_text()
    graph = load("1.yaml", ["mine"])
    assert (graph.pipeline, graph.components["unet"].class_path) == ("mine.Own", "mine.Net")
    sys.modules.pop("mine")


@pytest.mark.parametrize("name", ["../../out", "/out", "a/../../../out", "", "x" * 65])
def test_a_part_whose_name_is_not_a_folder_name_is_refused_and_nothing_is_written(
    graphrun: Cli, pipeline_copy: Path, name: str
) -> None:
    index(pipeline_copy, **{name: ["diffusers", "AutoencoderKL"]})
    previous_files = sorted(pipeline_copy.parent.rglob("*"))
    assert f"{name!r} cannot be a part's name, which is that of its folder" in refused(
        graphrun, pipeline_copy
    )
    assert sorted(pipeline_copy.parent.rglob("*")) == previous_files


def test_invalid_classes(graphrun: Cli) -> None:
    assert "did you mean 'FluxPipeline'?" in refused(graphrun, "diffusers.FluxPipelin")
    assert "is no pipeline" in refused(graphrun, "diffusers.AutoencoderKL")
    assert "outside the trusted packages" in refused(graphrun, "os.path")
    message = refused(graphrun, "diffusers.FluxPipeline")
    assert "--config transformer=FILE (FluxTransformer2DModel)" in message
    assert "--config tokenizer" not in message
    assert "takes no such argument; did you mean 'transformer'" in refused(
        graphrun, "diffusers.FluxPipeline", "--config", "transforme=x"
    )
    assert "--config vae=FILE (AutoencoderKL)" in refused(graphrun, "diffusers.FluxModularPipeline")
    assert "has no blocks of its own" in refused(graphrun, "diffusers.ModularPipeline")


def test_invalid_options(graphrun: Cli, pipeline: Path) -> None:
    assert "has no such part; it has" in refused(graphrun, pipeline, "--without", "text_encoder_9")
    assert "takes no such argument" in refused(graphrun, pipeline, "--set", "heigth=16")
    # an empty text is a value
    assert "takes no such argument" in refused(graphrun, pipeline, "--set", "promtp=")
    assert "did you mean 'unet'" in refused(graphrun, pipeline, "--dtype", "unt=float16")
    assert "it is bfloat16, float16, float32" in refused(graphrun, pipeline, "--dtype", "int8")
    assert "--config is for a pipeline's class" in refused(
        graphrun, pipeline, "--config", "unet=x.json"
    )
    assert "--revision is for a repository" in refused(graphrun, pipeline, "--revision", "main")


@pytest.mark.sweep("more")
def test_an_existing_graph_file_is_not_overwritten(
    graphrun: Cli, pipeline: Path, tmp_path: Path
) -> None:
    (tmp_path / "graph.yaml").write_text("mine")
    assert "graph.yaml already exists; add --overwrite" in refused(graphrun, pipeline)
    assert (tmp_path / "graph.yaml").read_text() == "mine"
    code, stdout, err = graphrun(
        "import",
        str(pipeline),
        "-o",
        "graph.yaml",
        "--overwrite",
        "--set",
        "height=16",
        "--set",
        "width=16",
    )
    assert code == 0, err
    assert "decode   decode         vae.decode" in stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "graph.yaml"]
    (tmp_path / "configs" / "other-unet.json").write_text("{}")
    code, _, err = graphrun(
        "import", str(pipeline), "-o", "other.yaml", "--set", "height=16", "--set", "width=16"
    )
    assert code == 2
    assert "other-unet.json already exists and differs; add --overwrite" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "graph.yaml"]


def test_a_probe_that_fails_names_the_call_and_what_to_do(
    graphrun: Cli, pipeline_copy: Path
) -> None:
    config = pipeline_copy / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "cross_attention_dim": 24}))
    for file in (pipeline_copy / "unet").glob("*.safetensors"):
        file.unlink()
    message = refused(graphrun, pipeline_copy)
    assert "unet.forward(float32[2, 4, " in message
    assert "encoder_hidden_states=float32[2, 77, 32]" in message
    assert "op: call" in message


def test_an_argument_that_no_file_holds_is_named(graphrun: Cli, tmp_path: Path) -> None:
    folder = saved("KandinskyV22Pipeline", tmp_path / "saved").folder
    message = refused(graphrun, folder)
    assert "needs image_embeds, negative_image_embeds, which no file has" in message
    assert "--set image_embeds=[1,768]" in message
