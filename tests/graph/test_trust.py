"""A graph file runs no code by its own word: it names the usual classes of two libraries, and
others where the caller says so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graphrun.errors import GraphError
from graphrun.graph.loading import load
from graphrun.modules.build import resolve_class

GRAPHS = Path(__file__).parents[2] / "graphs"
Cli = Callable[..., tuple[int, str, str]]
SCHEDULER = (
    "scheduler: {class: diffusers.FlowMatchEulerDiscreteScheduler, config: "
    "configs/flux-scheduler.json}"
)
BUDGET = ("--device", "sim", "--vram", "64M", "--set", "steps=1")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``mine`` with a scheduler, which leaves the file that is returned behind where it
    is imported."""
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(
        f"import pathlib, diffusers\npathlib.Path({str(ran)!r}).touch()\n"
        "class Own(diffusers.FlowMatchEulerDiscreteScheduler):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield ran
    sys.modules.pop("mine", None)


def asking(folder: Path, package: str, part: str) -> Path:
    """FLUX tiny, with ``part`` for its scheduler, that asks for ``package``."""
    path = folder / "graph.yaml"
    text = (GRAPHS / "flux-tiny.yaml").read_text()
    assert SCHEDULER in text
    allow = f"allow: [diffusers, transformers, {package}]"
    text = text.replace(SCHEDULER, f"scheduler: {part}").replace("pipeline:", f"{allow}\npipeline:")
    for name in ("configs", "tokenizers"):
        text = text.replace(f"{name}/", f"{GRAPHS}/{name}/")
    path.write_text(text)
    return path


@pytest.mark.parametrize("command", ["plan", "run", "explain", "frontier", "estimate", "batch"])
def test_a_file_that_allows_itself_a_command_runs_none(
    graphrun: Cli, tmp_path: Path, command: str
) -> None:
    ran = tmp_path / "ran"
    path = asking(
        tmp_path, "subprocess", f"{{class: subprocess.Popen, config: {{args: [touch, {ran}]}}}}"
    )
    (tmp_path / "requests.jsonl").write_text('{"prompt": "a"}\n')
    arguments = {
        "estimate": ("--device", "sim"),
        "batch": (*BUDGET, "--inputs", "requests.jsonl", "--resume"),
    }.get(command, BUDGET)
    code, _, message = graphrun("run" if command == "batch" else command, str(path), *arguments)
    assert not ran.exists()
    assert code == 2
    assert (
        f"{path}:5: allow.2: a file may ask for subprocess, and only you can trust it; " in message
    )
    problem = "subprocess.Popen is outside the trusted packages (diffusers, transformers)"
    assert f"{path}:32: parts.scheduler.class: {problem}" in message
    assert "--trust-package subprocess" in message


@pytest.mark.long
def test_a_package_runs_where_the_caller_trusts_it_and_no_plan_does(
    graphrun: Cli, tmp_path: Path, marker: Path
) -> None:
    path = asking(tmp_path, "mine", "{class: mine.Own, config: {}}")
    options = ("--device", "sim", "--vram", "64M", "--until", "encode")
    assert graphrun("plan", str(path), *options, "-o", "plan.json")[0] == 2
    assert not marker.exists()
    code, _, message = graphrun(
        "plan", str(path), *options, "-o", "plan.json", "--trust-package", "mine"
    )
    assert (code, message) == (0, "")
    assert marker.exists()
    for command in (
        ("run", "plan.json"),
        ("explain", "plan.json"),
        ("export", "plan.json", "--as", "diffusers"),
    ):
        code, _, message = graphrun(*command)
        assert (code, "--trust-package mine" in message) == (2, True)
    assert graphrun("explain", "plan.json", "--trust-package", "mine")[0] == 0
    assert (
        "can be exported"
        in graphrun("export", "plan.json", "--as", "diffusers", "--trust-package", "mine")[2]
    )
    assert load(path, ["mine"]).trust == ("mine",)
    with pytest.raises(GraphError, match=r"trust=\['mine'\]"):
        load(path)


@pytest.mark.parametrize("allow", ["allow: [diffusers, transformers, mine]\n", ""])
def test_the_callers_word_is_enough(tmp_path: Path, marker: Path, allow: str) -> None:
    path = asking(tmp_path, "mine", "{class: mine.Own, config: {}}")
    path.write_text(path.read_text().replace("allow: [diffusers, transformers, mine]\n", allow))
    assert load(path, ["mine"]).parts["scheduler"].class_path == "mine.Own"


# What a file might name in the two libraries that is none of a graph's things, by where it would
# stand.
REFUSED = {
    "transformers.Trainer": "part",
    "transformers.AutoModel": "part",
    "transformers.T5Config": "part",
    "diffusers.AutoModel": "part",  # makes the class that its folder names
    "diffusers.AutoPipelineForText2Image": "part",
    "diffusers.DiffusionPipeline": "part",
    "diffusers.FluxAutoBlocks": "part",
    "transformers.CLIPTextModel": "part",
    "diffusers.DDIMScheduler": "component",
    "transformers.CLIPTokenizer": "pipeline",
    "diffusers.FluxPipeline": "blocks",
}


# Those of them that no caller's trust makes usable, by what such an entry needs.
UNUSABLE = {
    "transformers.Trainer": "from_config or from_pretrained",
    "diffusers.DDIMScheduler": "torch.nn.Module",
    "transformers.CLIPTokenizer": "DiffusionPipeline",
    "diffusers.FluxPipeline": "ModularPipelineBlocks",
}


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_a_class_of_another_kind_is_refused_and_said_with_its_line(name: str) -> None:
    with pytest.raises(GraphError) as error_info:
        resolve_class(name, (), "graph.yaml:7", REFUSED[name])  # type: ignore[arg-type]
    assert str(error_info.value).startswith(f"graph.yaml:7: {name} is not ")
    assert f"--trust-package {name.split('.')[0]}" in str(error_info.value)
    other = {"diffusers": "transformers", "transformers": "diffusers"}[name.split(".")[0]]
    with pytest.raises(GraphError):
        resolve_class(name, (other,), "", REFUSED[name])  # type: ignore[arg-type]
    packages = (name.split(".")[0],)
    if name not in UNUSABLE:
        assert resolve_class(name, packages, "", REFUSED[name]).__name__ == name.split(".")[1]  # type: ignore[arg-type]
    else:
        with pytest.raises(GraphError, match=f"graph.yaml:7: {name} is not .*{UNUSABLE[name]}"):
            resolve_class(name, packages, "graph.yaml:7", REFUSED[name])  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(
    ("class_path", "requirement"),
    [
        (
            SCHEDULER,
            "a scheduler, guider, tokenizer or processor: such a class has from_config or "
            "from_pretrained",
        ),
        (
            "class: diffusers.AutoencoderKL",
            "a module with weights: such a class is a torch.nn.Module",
        ),
        (
            "pipeline: diffusers.FluxPipeline",
            "a pipeline: such a class is a DiffusionPipeline or ModularPipeline of diffusers",
        ),
    ],
)
def test_a_trusted_class_of_the_wrong_kind_is_never_made(
    graphrun: Cli, tmp_path: Path, class_path: str, requirement: str
) -> None:
    ran = tmp_path / "ran"
    key = class_path.partition(": ")[0]
    wrong = (
        f"{key}: {{class: subprocess.Popen, config: {{args: [touch, {ran}]}}}}"
        if class_path == SCHEDULER
        else f"{key}: subprocess.Popen"
    )
    path = asking(tmp_path, "subprocess", SCHEDULER.partition(": ")[2])
    text = path.read_text().replace(f"{GRAPHS}/configs/flux-scheduler", "configs/flux-scheduler")
    assert class_path in text
    path.write_text(
        text.replace(class_path, wrong).replace(
            " configs/flux-scheduler", f" {GRAPHS}/configs/flux-scheduler"
        )
    )
    line = path.read_text().partition("subprocess.Popen")[0].count("\n") + 1
    for command in ("plan", "run"):
        code, _, message = graphrun(
            command, str(path), *BUDGET, "--no-cache", "--trust-package", "subprocess"
        )
        assert (code, "Traceback" in message) == (2, False), message
        assert f"{path}:{line}: subprocess.Popen is not {requirement}" in message
    assert not ran.exists()


@pytest.mark.parametrize(
    "name",
    [
        "diffusers.DDIMScheduler",
        "diffusers.ClassifierFreeGuidance",
        "diffusers.VideoProcessor",
        "diffusers.modular_pipelines.qwenimage.modular_pipeline.QwenImagePachifier",
        "transformers.CLIPTokenizer",
        "transformers.PreTrainedTokenizerFast",
        "transformers.CLIPImageProcessor",
        "transformers.ClapFeatureExtractor",
        "transformers.Qwen2VLProcessor",
        "transformers.AutoTokenizer",
    ],
)
def test_what_pipelines_are_made_of_may_be_named(name: str) -> None:
    assert resolve_class(name, (), "", "part").__module__.startswith(name.partition(".")[0])


def test_a_refused_pipeline_and_part_are_said_with_the_files_line(
    graphrun: Cli, tmp_path: Path
) -> None:
    path = asking(
        tmp_path, "diffusers", "{class: transformers.TrainingArguments, config: {output_dir: made}}"
    )
    code, _, message = graphrun("plan", str(path), *BUDGET, "--no-cache")
    assert (
        code,
        f"{path}:32: transformers.TrainingArguments is not a scheduler" in message,
        "Traceback" in message,
    ) == (2, True, False)
    path = asking(tmp_path, "diffusers", "{class: diffusers.DDIMScheduler, config: {}}")
    path.write_text(path.read_text().replace("diffusers.FluxPipeline", "transformers.Trainer"))
    code, _, message = graphrun("plan", str(path), *BUDGET, "--no-cache")
    assert code == 2
    assert f"{path}:6: transformers.Trainer is not a pipeline" in message
