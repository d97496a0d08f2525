"""Import every pipeline class that diffusers' own tests build, and run it at its minimum budget.

    python benchmarks/imports.py --tests FOLDER [CLASS ...]    an hour on one core; writes
                                                               results/imports.json

FOLDER: the folder `tests` of a checkout of diffusers, which needs requests_mock and parameterized.
Each class is built by its test's `get_dummy_components` and called with its `get_dummy_inputs`.
Byte tokenizers and random models of the installed transformers replace the tokenizers, processors
and models that the tests take from the hub.

A row of the results: `imported` (its stages), `least_bytes`, and `equal`: whether the graph, run at
that budget on the simulated accelerator, makes the pipeline's output bit for bit; or `failed`, or
`not_built`, if the class's own call fails here. `without`: arguments that the graph does not take.
With CLASS only the rows of these classes are replaced.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import inspect
import json
import multiprocessing
import os
import pkgutil
import platform
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offline import ROOT, torchvision_operators

OPERATORS = torchvision_operators()

import torch  # noqa: E402
import transformers as t  # noqa: E402
from diffusers import ModelMixin as DiffusersModel  # noqa: E402
from import_whole import Saved, equal, planned, run  # noqa: E402
from tiny_pipelines import frozen  # noqa: E402
from tokenizers import AddedToken, Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import Whitespace  # noqa: E402

import graphrun  # noqa: E402
from graphrun.diffusers_.importing.standin import stand_in_words  # noqa: E402
from graphrun.graph.graph import Graph  # noqa: E402
from graphrun.sim import Machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "imports.json"
SECONDS = 240  # for one class
# arguments that a call needs but its test leaves to diffusers, or that need a special text
GIVEN: dict[str, dict[str, Any]] = {
    "AuraFlowPipeline": {"height": 32, "width": 32},
    "BriaFiboEditPipeline": {"prompt": '{"edit_instruction": "make it night"}'},
}
NOT_PASSED = (
    "generator",
    "output_type",
    "return_dict",
    "callback_on_step_end",
    "callback",
    "callback_steps",
)

# -- replacements of the hub
#
# words with numbers of their own in a vocabulary, by a part of the repository's name

# words with numbers of their own in a vocabulary, by a part of the repository's name
VISION = {
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
WORDS = {"qwen": VISION, "mistral3": {"[IMG]": 1000, "[IMG_BREAK]": 1001, "[IMG_END]": 1002}}
TALK = (
    "{% for message in messages %}{{ message['role'] }} {% if message['content'] is string "
    "%}{{ message['content'] }}"
    "{% else %}{% for item in message['content'] %}{% if item['type'] == 'text' %}{{ "
    "item['text'] }}"
    "{% elif item['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif "
    "%}{% endfor %}{% endif %} {% endfor %}"
)
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
}
T5 = {
    "vocab_size": 1103,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 5,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}


def configs() -> dict[str, Callable[[], Any]]:
    """Return replacements of models' configurations, by a part of the repository's name."""
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 37,
        "image_size": 30,
        "patch_size": 2,
    }
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 37,
    }
    mrope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    eyes = {"depth": 2, "num_heads": 4}
    return {
        "t5": lambda: t.T5Config(**T5),
        "T5": lambda: t.T5Config(**T5),
        "Bert": lambda: t.BertConfig(vocab_size=1124, **TINY),
        "Siglip": lambda: t.SiglipVisionConfig(**vision),
        "Llama": lambda: t.LlamaConfig(
            vocab_size=32000,
            bos_token_id=257,
            eos_token_id=258,
            pad_token_id=0,
            **(TINY | {"hidden_size": 16}),
        ),
        "Qwen2VL": lambda: t.Qwen2VLConfig(
            text_config=small | {"vocab_size": 151936, "rope_parameters": mrope},
            vision_config=eyes | {"embed_dim": 32, "hidden_size": 16},
        ),
        "Qwen3VL": lambda: t.Qwen3VLConfig(
            text_config=small | {"head_dim": 8, "vocab_size": 151936, "rope_parameters": mrope},
            vision_config=eyes
            | {
                "hidden_size": 32,
                "intermediate_size": 37,
                "out_hidden_size": 16,
                "deepstack_visual_indexes": [0],
            },
        ),
        "gemma3": lambda: t.Gemma3Config(
            text_config={
                **TINY,
                "vocab_size": 1000,
                "head_dim": 8,
                "num_key_value_heads": 2,
                "layer_types": ["full_attention"] * 2,
            },
            vision_config=vision,
        ),
    }


def config_of(name: str) -> Any:
    """Return the replacement of the configuration in the repository ``name``."""
    return next(make for part, make in configs().items() if part in name)()


def tokenizer(name: str, **settings: Any) -> Any:
    """Return a byte tokenizer that replaces the one in the repository ``name``."""
    words = json.loads(stand_in_words())
    extra_words = next((words for part, words in WORDS.items() if part in name.lower()), {})
    words["model"]["vocab"] |= extra_words
    tokenizer_object = Tokenizer.from_str(json.dumps(words))
    if "dummy-gemma" in name:  # for models that know eight words
        tokenizer_object = Tokenizer(
            WordLevel({"<pad>": 0, "</s>": 1, "<s>": 2, "<unk>": 3}, unk_token="<unk>")
        )
        tokenizer_object.pre_tokenizer = Whitespace()
    tokenizer_object.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in extra_words]
    )
    usual = {
        "model_max_length": 77 if "clip" in name else 512,
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    tokenizer_settings = {
        key: settings[key] for key in ("model_max_length", "padding_side") if key in settings
    }
    marks = {"unk_token": "<unk>" if "dummy-gemma" in name else "<pad>", "chat_template": TALK}
    return t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_object, **(usual | marks | tokenizer_settings)
    )


def processor(kind: Any, name: str) -> Any:
    """Return a processor of ``kind``, or of the model in the repository, for byte tokens."""
    if "mistral3" in name:
        return t.PixtralProcessor(
            t.PixtralImageProcessor(),
            tokenizer(name),
            chat_template=TALK.replace("<|image_pad|>", "[IMG]"),
        )
    if kind is t.GlmImageProcessor:
        return kind(t.GlmImageImageProcessor(), tokenizer(name), chat_template=TALK)
    if kind is t.Qwen3VLProcessor:
        return kind(
            t.Qwen2VLImageProcessor(patch_size=16),
            tokenizer(name),
            t.Qwen3VLVideoProcessor(),
            chat_template=TALK,
        )
    kind = t.Qwen2VLProcessor if kind is t.AutoProcessor else kind
    return kind(
        t.Qwen2VLImageProcessor(), tokenizer(name), t.Qwen2VLVideoProcessor(), chat_template=TALK
    )


def instead_of_the_hub() -> None:
    """Make `from_pretrained` of transformers build replacements, except for local folders."""

    def patched(owner: Any, make: Callable[..., Any]) -> None:
        usual = next(
            vars(parent)["from_pretrained"]
            for parent in owner.__mro__
            if "from_pretrained" in vars(parent)
        ).__func__

        def from_pretrained(kind: Any, name: Any, *arguments: Any, **settings: Any) -> Any:
            return (
                usual(kind, name, *arguments, **settings)
                if Path(name).is_dir()
                else make(kind, str(name), **settings)
            )

        owner.from_pretrained = classmethod(from_pretrained)

    patched(t.PreTrainedTokenizerBase, lambda kind, name, **settings: tokenizer(name, **settings))
    patched(t.AutoTokenizer, lambda kind, name, **settings: tokenizer(name, **settings))
    patched(t.AutoConfig, lambda kind, name, **settings: config_of(name))
    patched(t.PreTrainedModel, lambda kind, name, **settings: kind(config_of(name)))
    patched(t.ProcessorMixin, lambda kind, name, **settings: processor(kind, name))
    patched(t.AutoProcessor, lambda kind, name, **settings: processor(kind, name))
    patched(t.ClapFeatureExtractor, lambda kind, name, **settings: kind())
    patched(
        t.DPTImageProcessor, lambda kind, name, **settings: kind(size={"height": 32, "width": 32})
    )
    patched(
        t.SiglipImageProcessor,
        lambda kind, name, **settings: kind(size={"height": 30, "width": 30}),
    )


# -- what diffusers' tests build


def tested(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Return each pipeline class and the test that builds it, by its name."""
    sys.path[:0] = [str(folder.parent)]
    package = importlib.import_module(f"{folder.name}.pipelines")
    pipelines: dict[str, tuple[Any, Any]] = {}
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.rpartition(".")[2].startswith("test_"):
            continue
        try:
            tests = vars(importlib.import_module(module.name))
        except (
            ImportError,
            AttributeError,
        ):  # for a class that this version of diffusers does not have
            continue
        for test in (
            test_class
            for test_class in tests.values()
            if inspect.isclass(test_class) and test_class.__module__ == module.name
        ):
            kind = getattr(test, "pipeline_class", None)
            if inspect.isclass(kind) and all(
                callable(getattr(test, name, None))
                for name in ("get_dummy_components", "get_dummy_inputs")
            ):
                needs = inspect.signature(test.get_dummy_components).parameters.values()
                if [
                    parameter
                    for parameter in needs
                    if parameter.default is parameter.empty
                    and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
                ][1:] == []:
                    kind = next(
                        parent
                        for parent in kind.__mro__
                        if parent.__module__.startswith("diffusers.")
                    )
                    pipelines.setdefault(kind.__name__, (kind, test))
    return pipelines


@dataclass(frozen=True)
class Built(Saved):
    """A case of diffusers' tests. ``left_out``: arguments that are objects of diffusers, which no
    file can contain, and media that the graph does not take, since the call runs without them."""

    left_out: frozenset[str] = frozenset()
    pictured = False  # set by `row` from the graph's outputs

    def less(self, names: Iterable[str]) -> Built:
        """Return the case without the arguments ``names``."""
        left_out = self.left_out.union(names)
        return replace(
            self,
            left_out=left_out,
            arguments={k: v for k, v in self.arguments.items() if k not in left_out},
        )

    @property
    def sets(self) -> dict[str, Any]:
        """Return the values to set, as for this repository's cases; also a text in a special
        form."""
        texts = {key: value for key, value in GIVEN.get(self.name, {}).items() if key == "prompt"}
        return (
            super().sets
            | texts
            | {key: value for key, value in self.arguments.items() if isinstance(value, dict)}
        )

    @property
    def inputs(self) -> dict[str, Any]:
        return {key: value for key, value in super().inputs.items() if not isinstance(value, dict)}


def built(name: str, kind: Any, test: Any, folder: Path) -> Built:
    """Save the pipeline of ``test`` in ``folder``; return it with the arguments of its call."""
    case = test.__new__(test)
    torch.manual_seed(0)
    parts = case.get_dummy_components()
    for part in (
        part
        for part in parts.values()
        if isinstance(part, DiffusersModel) and not hasattr(part, "_internal_dict")
    ):
        part.register_to_config()  # the tests' own safety checker
    pipe = frozen(kind(**parts))
    pipe.set_progress_bar_config(disable=True)
    device = (
        {"device": "cpu"} if "device" in inspect.signature(case.get_dummy_inputs).parameters else {}
    )
    inputs = case.get_dummy_inputs(**device) | GIVEN.get(name, {})
    arguments = {
        key: listed(value)
        for key, value in inputs.items()
        if key not in NOT_PASSED and value is not None
    }
    pipe.save_pretrained(folder / name)
    return Built(name, folder / name, pipe, arguments).less(
        key for key, value in arguments.items() if strange(value)
    )


def imported(source: Built, folder: Path) -> tuple[Graph, Any]:
    """Return the graph of the saved pipeline, and its modules; with a component that only the tests
    define, of the live pipeline."""
    if all(
        type(part).__module__.startswith(("diffusers", "transformers"))
        for part in source.pipe.components.values()
        if part is not None
    ):
        return source.imported().write(folder / "graph.yaml"), None
    live = graphrun.from_pipeline(source.pipe)
    return live.to_yaml(folder / "graph.yaml", inputs=source.sets), live.graph_modules


def listed(value: Any) -> Any:
    return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def strange(value: Any) -> bool:
    """Return whether ``value`` is neither plain data nor a picture or an array."""
    if isinstance(value, (list, dict)):
        return any(strange(item) for item in (value.values() if isinstance(value, dict) else value))
    return not (
        isinstance(value, (bool, int, float, str))
        or hasattr(value, "shape")
        or hasattr(value, "tobytes")
    )


def row(name: str, kind: Any, test: Any) -> dict[str, Any]:
    """Return the row of results of the class ``name``."""
    result: dict[str, Any] = {"class": name}
    with tempfile.TemporaryDirectory() as folder:
        try:
            source = built(name, kind, test, Path(folder))
            source.expected()
        except Exception as error:  # noqa: BLE001 - of any code
            shown()
            return result | {"not_built": line(error)}
        try:
            graph, modules = imported(source, Path(folder))
            result["imported"] = f"{len(graph.stages)} stage{'s' * (len(graph.stages) > 1)}"
            source = source.less({key for key in source.inputs if key not in graph.inputs})
            result |= {"without": sorted(source.left_out)} if source.left_out else {}
            solution = planned(graph, source.inputs, at_minimum=True)
            result["least_bytes"] = solution.problem.budget_bytes
            torch.manual_seed(1)
            trace = run(graph, solution, source.inputs, modules)
            output_type = (
                {"output_type": "pil"} if {"image", "video"} & trace.outputs.keys() else {}
            )
            output = next(iter(trace.outputs.values()))
            result["equal"] = equal(output, source.expected(**output_type))
            if not result["equal"] and modules is None:
                pipe = frozen(kind.from_pretrained(Path(folder) / name))
                pipe.set_progress_bar_config(disable=True)
                if equal(output, replace(source, pipe=pipe).expected(**output_type)):
                    result["equal"] = "to the pipeline that diffusers loads from the folder"
            if not result["equal"]:
                with Machine():
                    source.pipe.to("sim")
                    result["equal"] = (
                        "to itself on the simulated accelerator"
                        if equal(output, source.expected(**output_type))
                        else False
                    )
        except Exception as error:  # noqa: BLE001 - of any code
            shown()
            result["failed"] = line(error)
    return result


def shown() -> None:
    if os.environ.get("SHOW"):
        traceback.print_exc()


def line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def bounded(name: str, kind: Any, test: Any) -> dict[str, Any]:
    """Run `row` in a process of its own, ended after `SECONDS`."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        signal.alarm(SECONDS)
        sender.send(row(name, kind, test))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    sender.close()
    try:
        return dict(receiver.recv())
    except EOFError:
        return {"class": name, "failed": f"the process ended, or took more than {SECONDS} s"}
    finally:
        process.join()


def rows(folder: Path, names: list[str]) -> Iterator[dict[str, Any]]:
    instead_of_the_hub()
    torch.set_num_threads(1)
    for name, (kind, test) in tested(folder).items():
        if not names or name in names:
            start = time.perf_counter()
            result = bounded(name, kind, test)
            print(
                f"{time.perf_counter() - start:5.1f} s  {' '.join(map(str, result.values()))}",
                flush=True,
            )
            yield result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, required=True)
    parser.add_argument("classes", nargs="*")
    options = parser.parse_args()
    old_rows = (
        json.loads(RESULTS.read_text())["rows"] if options.classes and RESULTS.exists() else []
    )
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
    }
    report |= {name: version(name) for name in ("diffusers", "transformers", "torch")}
    rows_by_class = {old_row["class"]: old_row for old_row in old_rows}
    for result in rows(options.tests.resolve(), options.classes):
        rows_by_class[result["class"]] = result
        run_count = sum(bool(item.get("equal")) for item in rows_by_class.values())
        built_count = sum("not_built" not in item for item in rows_by_class.values())
        report |= {
            "built": built_count,
            "equal": run_count,
            "rows": sorted(rows_by_class.values(), key=lambda item: item["class"]),
        }
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(
        f"{run_count} of {built_count} imported, run at their least budget and equal; "
        f"{len(rows_by_class) - built_count} could not be built"
    )


if __name__ == "__main__":
    main()
