"""A graph file is accepted or refused; a refusal names the line, the entry, what is wrong and what
was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphrun.errors import GraphError, InputError, PlanError
from graphrun.graph.loading import load
from graphrun.graph.parts import Reference
from graphrun.graph.settings import completed, settings_of
from graphrun.graph.values import outside

GRAPHS = Path(__file__).parents[2] / "graphs"
TINY = (
    (GRAPHS / "flux-tiny.yaml")
    .read_text()
    .replace("configs/", f"{GRAPHS}/configs/")
    .replace("tokenizers/", f"{GRAPHS}/tokenizers/")
)


def written(folder: Path, *changes: tuple[str, str], text: str = TINY) -> Path:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / "graph.yaml"
    path.write_text(text)
    return path


def refusal(path: Path) -> list[str]:
    with pytest.raises(GraphError) as error_info:
        load(path)
    return str(error_info.value).replace(f"{path}: ", "file: ").replace(f"{path}:", "").splitlines()


@pytest.mark.parametrize("name", ["flux-dev", "flux-tiny", "sdxl", "sdxl-tiny"])
def test_reference_graphs_load(name: str) -> None:
    graph = load(GRAPHS / f"{name}.yaml")
    assert graph.name == name
    assert [stage.name for stage in graph.stages] == ["encode", "denoise", "decode"]
    assert graph.producers("decode") == ("denoise", "encode")
    assert graph.outputs == {"image": Reference("stage", "decode", "image")}


def test_everything_of_a_component_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path, ("dtype: bfloat16}", "dtype: bfloat16, precision: [bfloat16, nf4], seed: 3}")
    )
    component = load(path).component("text_encoder")
    assert (component.class_path, component.dtype) == ("transformers.CLIPTextModel", "bfloat16")
    assert (component.precision, component.seed, component.source) == (("bfloat16", "nf4"), 3, None)
    assert component.config["hidden_size"] == 64
    assert component.file_line == f"{path}:17"


def test_literals_and_references_are_arguments(tmp_path: Path) -> None:
    graph = load(
        written(
            tmp_path,
            ("  steps: {type: int, default: 4, minimum: 1}\n", ""),
            ("steps: $steps", "steps: 4"),
        )
    )
    assert graph.stage("denoise").arguments["steps"] == 4
    assert graph.stage("denoise").arguments["embeds"] == Reference("stage", "encode", "embeds")


def test_stages_may_be_written_in_any_order(tmp_path: Path) -> None:
    start, end = TINY.index("  encode:\n"), TINY.index("  denoise:\n")
    reordered = TINY[:start] + TINY[end:].replace("\noutputs:", TINY[start:end] + "\noutputs:")
    graph = load(written(tmp_path, text=reordered))
    assert [stage.name for stage in graph.stages] == ["encode", "denoise", "decode"]


STRICT = {
    "unknown key": (
        "uses: [vae]",
        "use: [vae]",
        "50: stages.decode: unknown key 'use'; did you mean 'uses'?",
    ),
    "unknown key in a list": (
        "dtype: bfloat16}",
        "dtype: bfloat16, loras: [{file: x.safetensors, scal: 2.0}]}",
        "17: components.text_encoder.loras.0: unknown key 'scal'; did you mean 'scale'?",
    ),
    "unknown section": ("parts:", "part:", "22: unknown key 'part'; did you mean 'parts'?"),
    "missing key": ("op: decode\n", "\n", "48: stages.decode: 'op' is missing"),
    "key twice": ("name: flux-tiny", "name: a\nname: b", "5: key 'name' is given twice"),
    "format version": (
        "graphrun: 1",
        "graphrun: 2",
        "3: graphrun: this graphrun reads files of version 1, not 2",
    ),
    "dtype": (
        "dtype: bfloat16",
        "dtype: bf16",
        "17: components.text_encoder.dtype: unknown dtype 'bf16'; did you mean 'bfloat16'?",
    ),
    "wrong type": (
        "uses: [vae]",
        "uses: vae",
        "50: stages.decode.uses: expected a list, got 'vae'",
    ),
    "empty value": (
        "op: decode",
        "op:",
        "49: stages.decode.op: is empty; give it a value, or leave it out",
    ),
    "name": (
        "  prompt: {",
        "  my-prompt: {",
        "8: inputs.my-prompt: 'my-prompt' is not a name: letters, digits and underscores, at most "
        "64, no digit first",
    ),
    "default's type": (
        "default: 4,",
        "default: four,",
        "11: inputs.steps.default: 'four' is not an int",
    ),
    "default's range": (
        "default: 4,",
        "default: 0,",
        "11: inputs.steps.default: 0 is less than the minimum, 1",
    ),
    "default's multiple": (
        "default: 128,",
        "default: 100,",
        "9: inputs.height.default: 100 is not a multiple of 16; use 96 or 112",
    ),
    "multiple of text": (
        "{type: str,",
        "{type: str, multiple_of: 2,",
        "8: inputs.prompt.multiple_of: only for int, and 'prompt' is a str",
    ),
    "class path": (
        "diffusers.AutoencoderKL",
        "AutoencoderKL",
        "20: components.vae.class: 'AutoencoderKL' is not a class path such as "
        "diffusers.AutoencoderKL",
    ),
    "package misspelled": (
        "diffusers.AutoencoderKL",
        "difusers.AutoencoderKL",
        "20: components.vae.class: difusers.AutoencoderKL is outside the trusted packages "
        "(diffusers, transformers);"
        " did you mean 'diffusers'?",
    ),
    "package not allowed": (
        "diffusers.FluxPipeline",
        "os.system",
        f"5: pipeline: os.system is {outside('os', ('diffusers', 'transformers'))}",
    ),
    "no such config": (
        f"config: {GRAPHS}/configs/tiny-t5.json",
        "config: nowhere/t5.json",
        "18: components.text_encoder_2.config: FOLDER/nowhere/t5.json: no such file",
    ),
    "neither config nor source": (
        f"config: {GRAPHS}/configs/tiny-t5.json, ",
        "",
        "18: components.text_encoder_2: neither config nor source; give config: {} for the "
        "defaults of its class",
    ),
    "no such source": (
        f"config: {GRAPHS}/configs/tiny-t5.json,",
        "source: ./t5,",
        "18: components.text_encoder_2: no config, and no FOLDER/t5/config.json; give config: or "
        "another source:",
    ),
    "config beyond JSON": (
        f"config: {GRAPHS}/configs/tiny-t5.json",
        "config: {day: 2024-01-01}",
        "18: components.text_encoder_2.config: has a value that is not JSON: Object of type "
        "date is not JSON serializable",
    ),
    "no such tokenizer": (
        f"file: {GRAPHS}/tokenizers/bytes.json",
        "file: x.json",
        "25: parts.tokenizer.file: no such file: FOLDER/x.json",
    ),
    "unknown op": (
        "op: denoise",
        "op: denoize",
        "39: stages.denoise.op: unknown op 'denoize'; did you mean 'denoise'?",
    ),
    "unknown argument": (
        "steps: $steps",
        "step: $steps",
        "45: stages.denoise.with.step: denoise has no argument 'step'; did you mean 'steps'?",
    ),
    "missing argument": (
        "      embeds: $encode.embeds\n",
        "",
        "38: stages.denoise: denoise needs 'embeds'; add it to with:",
    ),
    "literal for a value": (
        "embeds: $encode.embeds\n",
        "embeds: x\n",
        "42: stages.denoise.with.embeds: expected embeds, a stage's output such as $stage.embeds; "
        "got 'x'",
    ),
    "argument's kind": (
        "seed: $seed",
        "seed: $prompt",
        "47: stages.denoise.with.seed: expected int, and $prompt is str",
    ),
    "unknown component": (
        "uses: [vae]",
        "uses: [vea]",
        "50: stages.decode.uses.0: unknown component 'vea'; did you mean 'vae'?",
    ),
    "component twice": (
        "uses: [vae]",
        "uses: [vae, vae]",
        "50: stages.decode.uses.1: 'vae' is given twice",
    ),
    "dangling input": (
        "$height\n",
        "$heigth\n",
        "43: stages.denoise.with.height: no such input 'heigth'; did you mean 'height'?",
    ),
    "dangling stage": (
        "$denoise.latents",
        "$denois.latents",
        "51: stages.decode.with.latents: no such stage 'denois'; did you mean 'denoise'?",
    ),
    "dangling output": (
        "$denoise.latents",
        "$denoise.latent",
        "51: stages.decode.with.latents: stage 'denoise' has no output 'latent'; did you mean "
        "'latents'?",
    ),
    "stage as value": (
        "$denoise.latents",
        "$denoise",
        "51: stages.decode.with.latents: $denoise is a stage; say which of its outputs, such as "
        "$denoise.latents",
    ),
    "output not a reference": (
        "$decode.image",
        "decode.image",
        "53: outputs.image: 'decode.image' is not a reference such as $decode.image",
    ),
    "no outputs": ("{image: $decode.image}", "{}", "53: outputs: must not be empty"),
    "unused component": (
        "uses: [text_encoder, text_encoder_2]",
        "uses: [text_encoder]",
        "18: components.text_encoder_2: no stage uses it; add it to uses: of a stage, or remove it",
    ),
    "unused input": (
        "seed: $seed",
        "seed: 0",
        "13: inputs.seed: no stage reads it; remove it, or use it",
    ),
    "unused stage": (
        "outputs: {image: $decode.image}",
        "  again: {op: encode_prompt, with: {prompt: $prompt}}\noutputs: {image: $decode.image}",
        "53: stages.again: nothing reads its outputs; remove it, or use it",
    ),
}


@pytest.mark.parametrize(("old", "new", "message"), STRICT.values(), ids=STRICT)
def test_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert message.replace("FOLDER", str(tmp_path)) in refusal(written(tmp_path, (old, new)))


# these changes are two mistakes: a reference dangles, an input is unused
TWO = (
    "name",
    "argument's kind",
)


@pytest.mark.parametrize("case", [case for case in STRICT if case not in TWO])
def test_one_mistake_is_one_problem(case: str, tmp_path: Path) -> None:
    old, new, message = STRICT[case]
    assert refusal(written(tmp_path, (old, new))) == [message.replace("FOLDER", str(tmp_path))]


SIX = (
    ("name: flux-tiny", "name: flux/tiny", "4: name: 'flux/tiny' cannot be a graph's name"),
    (
        "{type: int, default: 4,",
        "{type: integer, default: 4,",
        "11: inputs.steps.type: unknown type 'integer'",
    ),
    (
        "/tiny-flux-vae.json",
        "/nowhere.json",
        f"20: components.vae.config: {GRAPHS}/configs/nowhere.json: no such file",
    ),
    ("op: encode_prompt", "op: encode_promt", "35: stages.encode.op: unknown op 'encode_promt'"),
    (
        "uses: [transformer]",
        "uses: [tranformer]",
        "40: stages.denoise.uses.0: unknown component 'tranformer'",
    ),
    (
        "latents: $denoise.latents",
        "latents: $denois.latents",
        "51: stages.decode.with.latents: no such stage 'denois'",
    ),
)


def test_six_mistakes_of_several_kinds_are_reported_together(tmp_path: Path) -> None:
    """In the shape of entries, in files, and in names that refer to others; none hides another."""
    lines = refusal(written(tmp_path, *((old, new) for old, new, _ in SIX)))
    assert [line[: len(start)] for line, (_, _, start) in zip(lines, SIX, strict=True)] == [
        start for _, _, start in SIX
    ]


WRONG_SHAPES = {
    "an input": ("{type: str,", "{type: text,"),
    "a component": ("class: diffusers.AutoencoderKL, ", ""),
    "a part": ("  scheduler: {class: diffusers.FlowMatchEulerDiscreteScheduler,", "  scheduler: {"),
    "a stage": ("op: encode_prompt", "op:"),
    "an argument": ("steps: $steps", "steps: {a: {b: 1}}"),
    "a list": ("uses: [vae]", "uses: [1, 2]"),
    "an output": ("outputs: {image: $decode.image}", "outputs: {image: 5}"),
    "a key of an item": ("outputs:", "directives: {keep: vae}\noutputs:"),
}


@pytest.mark.parametrize(("old", "new"), WRONG_SHAPES.values(), ids=WRONG_SHAPES)
def test_an_entry_of_a_wrong_shape_hides_no_other_mistake_and_adds_none(
    old: str, new: str, tmp_path: Path
) -> None:
    first_problems = refusal(written(tmp_path, (old, new)))
    assert len({line.partition(":")[0] for line in first_problems}) == 1
    other = ("height: $height\n", "height: $heigth\n")
    (new_problem,) = set(refusal(written(tmp_path, (old, new), other))) - set(first_problems)
    assert ".with.height: no such input 'heigth'; did you mean 'height'?" in new_problem


def test_all_problems_are_said_in_the_order_of_lines(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        ("uses: [vae]", "use: [vae]"),
        ("dtype: bfloat16", "dtype: bf16"),
        ("default: 4", "default: []"),
    )
    assert [line.split(":")[0] for line in refusal(path)] == ["11", "17", "50"]


def test_a_cycle_is_named_by_its_members(tmp_path: Path) -> None:
    path = written(tmp_path, ("embeds: $encode.embeds\n", "embeds: $decode.image\n"))
    assert (
        "38: stages.denoise: stages form a cycle: denoise -> decode -> denoise; remove one of "
        "these references" in refusal(path)
    )
    path = written(tmp_path, ("{prompt: $prompt,", "{prompt: $decode.image,"))
    assert any(
        "34: stages.encode: stages form a cycle: encode -> denoise -> decode -> encode;" in line
        for line in refusal(path)
    )


def test_allow_narrows(tmp_path: Path) -> None:
    lines = refusal(written(tmp_path, ("name:", "allow: [diffusers]\nname:")))
    assert [line.split(": ")[1] for line in lines][:2] == [
        "components.text_encoder.class",
        "components.text_encoder_2.class",
    ]
    assert lines[0].endswith(
        "is outside the trusted packages (diffusers); allow: leaves transformers out: add it there"
    )


def test_bad_json_is_said_with_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "t5.json").write_text('{\n  "d_model": \n}')
    path = written(tmp_path, (f"{GRAPHS}/configs/tiny-t5.json", "t5.json"))
    assert refusal(path) == [
        f"18: components.text_encoder_2.config: {tmp_path}/t5.json:3: is not JSON: Expecting value"
    ]


NOT_YAML = {
    "empty": (b"", "file: the file is empty"),
    "a list": (b"- a", "1: expected a mapping, got a list"),
    "a text": (b"hello", "1: expected a mapping, got 'hello'"),
    "open bracket": (b"a: 1\nb: [2\nc: 3", "3: not YAML: expected ',' or ']', but got ':'"),
    "tab": (b"a:\n\tb: 1", "2: not YAML: found character '\\t' that cannot start any token"),
    "two documents": (b"a: 1\n---\nb: 2", "2: not YAML: but found another document"),
    "list as key": (b"? [a]\n: 1", "1: not YAML: found unhashable key"),
    "impossible date": (b"a: 2024-13-45", "file: not YAML: month must be in 1..12"),
    "not UTF-8": (b"a: \xff\xfe", "file: not a text file: byte 3 is not UTF-8"),
    "control character": (
        b"a: \x00",
        "file: not YAML: special characters are not allowed at character 3",
    ),
    "unsafe tag": (
        b"a: !!python/object/apply:os.system [ls]",
        "1: not YAML: the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not read: "
        "leave it out",
    ),
    "alias in itself": (b"a: &a [*a]", "1: an alias that contains itself"),
    "billion laughs": (
        b"a0: &a0 [x]\n"
        + b"".join(
            b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 10)
        ),
        "5: it has 21,111 entries once its aliases are expanded, and at most 20,000 are accepted; "
        "if this is meant: "
        "graphrun --limit nodes=21111 ..., in Python graphrun.raise_limits(nodes=21111)",
    ),
    "too deep": (b"[" * 2000, "1: not YAML: nested more than 100 deep"),
}


@pytest.mark.parametrize(("content", "message"), NOT_YAML.values(), ids=NOT_YAML)
def test_unreadable(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.yaml"
    path.write_bytes(content)
    assert refusal(path) == [message]


def test_no_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing.yaml") == ["file: no such file"]
    (folder,) = refusal(tmp_path)
    assert folder.startswith(
        f"file: is a folder, not a graph file; to make one: graphrun import {tmp_path} -o "
    )


def test_a_local_source_gives_the_configs(tmp_path: Path) -> None:
    """A folder in the layout of diffusers, named relative to the graph file; the digest is that of
    the configs written out."""
    folder = tmp_path / "model" / "text_encoder_2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text((GRAPHS / "configs/tiny-t5.json").read_text())
    graph = load(
        written(
            tmp_path,
            (f"config: {GRAPHS}/configs/tiny-t5.json, ", ""),
            ("name:", "source: ./model\nname:"),
        )
    )
    assert graph.component("text_encoder_2").config["d_model"] == 96
    assert graph.component("text_encoder_2").source == str(folder)
    assert graph.digest == load(GRAPHS / "flux-tiny.yaml").digest


def test_a_hub_source_is_split_by_component(tmp_path: Path) -> None:
    graph = load(
        written(
            tmp_path,
            ("name:", "source: owner/repo\nname:"),
            (f"config: {GRAPHS}/configs/tiny-t5.json", "source: a/t5"),
        )
    )
    assert graph.component("text_encoder").source == "owner/repo/text_encoder"
    assert graph.component("text_encoder_2").source == "a/t5"
    assert not graph.component("text_encoder_2").has_config


def test_an_optional_input_may_be_left_out_and_is_nothing_then(tmp_path: Path) -> None:
    old, new = "{type: str, default: a lighthouse at dusk}", "{type: str, optional: true}"
    graph = load(written(tmp_path, (old, new)))
    assert graph.resolve({})["prompt"] is None
    assert graph.for_planning({})["prompt"] is None, "a plan without it is for a run without it"
    assert graph.resolve({"prompt": "a"})["prompt"] == "a"
    assert graph.resolve(graph.resolve({}))["prompt"] is None
    with pytest.raises(InputError, match="input 'prompt': None is not a str"):
        load(written(tmp_path)).resolve({"prompt": None})
    settings = settings_of(graph, graph.for_planning({}))
    assert completed(graph, settings, {})["prompt"] is None
    with pytest.raises(
        PlanError, match="the plan is for prompt=None, this run has prompt=one text"
    ):
        completed(graph, settings, {"prompt": "a"})
    problems = refusal(written(tmp_path, (old, "{type: str, default: a, optional: true}")))
    assert problems == [
        "8: inputs.prompt.optional: 'prompt' has a default, so it may be left out anyway: remove "
        "one of them"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "/abs/x",
        "..",
        ".",
        ".x",
        "-x",
        "a/b",
        "a\\\\b",
        "a b",
        "é",
        "x" * 65,
        'x\\"; import os',
    ],
)
def test_a_graphs_name_is_a_files_name(tmp_path: Path, name: str) -> None:
    (line,) = refusal(written(tmp_path, ("name: flux-tiny", f'name: "{name}"')))
    assert line.startswith("4: name: ")
    assert (
        "cannot be a graph's name, since output files are named by it: letters, digits, dots,"
        in line
    )
    assert load(written(tmp_path, ("name: flux-tiny", "name: Flux.1-dev_2"))).name == "Flux.1-dev_2"


def test_a_long_name_of_a_stage_is_refused_before_it_is_a_file(tmp_path: Path) -> None:
    (line,) = refusal(
        written(
            tmp_path, ("  decode:\n", f"  {'d' * 65}:\n"), ("$decode.image", f"${'d' * 65}.image")
        )
    )
    assert "at most 64" in line
