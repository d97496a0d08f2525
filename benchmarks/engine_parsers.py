"""Run the argument parsers of other engines on every line that `graphrun export` may write.

    python benchmarks/engine_parsers.py FOLDER > tests/profile/engine_lines.json

FOLDER has what the parsers are in; nothing of it is installed:

    sglang/, vllm_omni/   of the wheels, unzipped
    ComfyUI/              its checkout
    sd-parser             `sd_cpp_parser.cpp`, compiled with stable-diffusion.cpp's parser

Modules that a parser imports and does not need, such as vllm, are stand-ins.
"""

from __future__ import annotations

import argparse
import importlib.abc
import json
import shlex
import subprocess
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
SGLANG, OMNI = "sglang.multimodal_gen.runtime", "vllm_omni"
REAL = {
    f"{SGLANG}.server_args.server_args",
    f"{SGLANG}.server_args.auto_tune",
    f"{SGLANG}.server_args.disagg",
    f"{SGLANG}.utils.argparse",
    f"{SGLANG}.disaggregation.roles",
    f"{SGLANG}.managers.memory_managers.component_residency",
    f"{SGLANG}.managers.memory_managers.layerwise_offload_components",
    f"{OMNI}.entrypoints.cli.serve",
    f"{OMNI}.diffusion.offloader.config",
    f"{OMNI}.utils.tracking_parser",
}
"""Modules that are run. Packages around them are folders without code."""


class StandIn(type):
    """A class that has any attribute, which is a stand-in too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name, (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        is_engines = cls.__bases__ != (object,)  # a class that derives from a stand-in
        return cls.__new__(cls) if is_engines else StandIn(cls.__name__, (), {})

    def __iter__(cls) -> Any:
        return iter(())


class StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `REAL` modules in the folder, and stand-ins for all others that are not installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec:
        if name in REAL:
            file = self.folder / f"{name.replace('.', '/')}.py"
            loader = SourceFileLoader(name, str(file))
            return ModuleSpec(name, loader, origin=str(file))
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Any:
        return StandInModule(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def sglang(words: Sequence[str]) -> None:
    server_args = import_module(f"{SGLANG}.server_args.server_args")
    arguments = import_module(f"{SGLANG}.utils.argparse")
    parser = arguments.FlexibleArgumentParser(formatter_class=argparse.HelpFormatter)
    server_args.ServerArgs.add_cli_args(parser)
    parser.parse_args(words[2:])


def vllm_omni(words: Sequence[str]) -> None:
    serve: Any = import_module(f"{OMNI}.entrypoints.cli.serve")
    serve.make_arg_parser = vllm_parser
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.OmniServeCommand().subparser_init(parser.add_subparsers())
    values = parser.parse_args(words[1:])
    config = import_module(f"{OMNI}.diffusion.offloader.config")
    config.parse_diffusion_offload_config(values.diffusion_offload_config)


def vllm_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add vllm's own options that lines have."""
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--revision")
    return parser


def comfyui(folder: Path, words: Sequence[str]) -> None:
    code = "import comfy.options; comfy.options.enable_args_parsing(); import comfy.cli_args"
    command = [sys.executable, "-c", code, *words[2:]]
    subprocess.run(command, cwd=folder / "ComfyUI", check=True)


def main(folder: Path) -> None:
    sys.path[:0] = [str(REPOSITORY / "tests" / "standins"), str(REPOSITORY)]
    from engine_wishes import engine_lines  # type: ignore[import-not-found]

    from graphrun.profile.engines import ENGINES

    parsers = {
        "sglang": sglang,
        "vllm-omni": vllm_omni,
        "sd.cpp": lambda words: subprocess.run([folder / "sd-parser", *words[1:]], check=True),
        "comfyui": lambda words: comfyui(folder, words),
    }
    lines = engine_lines()  # before there are stand-ins
    sys.meta_path.append(Finder(folder))
    for name, parse in parsers.items():
        for line in lines[name]:
            parse(shlex.split(line))
        try:
            parse(shlex.split(f"{lines[name][0]} --no-such-option"))
        except (SystemExit, subprocess.CalledProcessError):
            continue
        raise SystemExit(f"{name} accepts everything")
    record = {name: {"parser": ENGINES[name].source, "accepted": lines[name]} for name in parsers}
    json.dump(record, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
