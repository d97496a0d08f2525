"""What ``--json`` prints is documented in docs/json.md, key by key, and has a version."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphrun.profile import calibrate_cpu

DOCUMENT = Path(__file__).parents[2] / "docs" / "json.md"
Cli = Callable[..., tuple[int, str, str]]
SIM = ("flux-tiny", "--device", "sim", "--ram", "8G", "--set", "steps=2")
PLAN, COMMON = "plan, explain, map, run", "JSON of the commands"
# Printed for graphs with several precisions, where a directive forbids a placement, for several
# devices, and where the kernel can enforce a budget.
NOT_HERE = {
    f"explain plan.json COMPONENT: alternatives[].{key}"
    for key in ("variant", "needs_permission", "refusal")
}
HELPER_KEYS = ("hardware", "budget_bytes", "effective_bytes", "peak_bytes", "components[]")
NOT_HERE |= {f"plan --cluster: transfers[].{key}" for key in ("value", "to[]", "nbytes", "seconds")}
NOT_HERE |= {f"plan --cluster: devices[].secondaries[].{key}" for key in ("hardware", "vram_bytes")}
NOT_HERE |= {f"{PLAN}: secondaries[].{key}" for key in HELPER_KEYS} | {"frontier: device"}
NOT_HERE |= {f"{PLAN}: kernel.{key}" for key in ("limit_bytes", "peak_bytes")}
CASES = [
    (PLAN, ("plan", "plan.json")),
    (PLAN, ("plan", "flux-tiny", "--device", "cpu", "--memory", "2G", "--set", "steps=2")),
    (PLAN, ("explain", "plan.json")),
    (PLAN, ("map", "large.json", "maps.json")),
    (PLAN, ("run", "plan.json", "-o", "flux.png")),
    ("plan --cluster", ("plan", "flux-tiny", "--cluster", "cluster.yaml", "--set", "steps=2")),
    ("nothing fits", ("plan", *SIM, "--vram", "1M")),
    ("explain plan.json COMPONENT", ("explain", "plan.json", "transformer")),
    ("check", ("check", "plan.json")),
    ("check", ("check", "broken.json")),
    ("diff", ("diff", "plan.json", "large.json")),
    ("estimate", ("estimate", "flux-tiny", "--device", "sim", "--set", "steps=2")),
    ("compare", ("compare", *SIM, "--vram", "12M")),
    ("fit", ("fit", "flux-tiny", "--card", "rtx4060laptop", "--ram", "16G", "--set", "steps=2")),
    ("frontier", ("frontier", *SIM, "--vram", "2M:6M:4M")),
    ("frontier", ("frontier", *SIM[:-2], "--vram", "6M", "--sweep", "steps=2:3:1")),
    ("run --inputs", ("run", *SIM, "--vram", "6M", "--inputs", "requests.jsonl", "-o", "many.png")),
    ("list", ("list",)),
    ("cache ls", ("cache", "ls")),
    ("doctor", ("doctor",)),
    ("calibrate", ("calibrate", "--device", "cpu", "--seconds", "0.1", "--name", "mine")),
]


def expanded(text: str) -> list[str]:
    """The keys that ``text`` stands for: ``a.{b, c}`` is short for ``a.b`` and ``a.c``."""
    prefix, _, names = text.removesuffix("}").partition("{")
    return [f"{prefix}{name}" for name in names.split(", ")]


def documented() -> dict[str, set[str]]:
    """The keys of each section of the document, and of those that all have."""
    keys_by_section: dict[str, set[str]] = {}
    for section in re.split(r"^##? ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^- (`.*?`): ", section, flags=re.MULTILINE)
        keys_by_section[section.partition("\n")[0]] = {
            key for row in rows for text in re.findall("`([^`]+)`", row) for key in expanded(text)
        }
    return keys_by_section


def keys(data: Any, path: str = "") -> Iterator[str]:
    """The paths of the values in ``data``; of an empty list or mapping, of what would be in it."""
    if data == {}:
        yield f"{path}.NAME"
    elif data == []:
        yield f"{path}[]"
    elif isinstance(data, dict):
        for name, value in data.items():
            yield from keys(value, f"{path}.{name}".removeprefix("."))
    elif isinstance(data, list):
        for value in data:
            yield from keys(value, f"{path}[]")
    else:
        yield path


def named_by(key: str, pattern: str) -> bool:
    """Whether ``pattern`` of the document stands for the path ``key``, or for what would be in its
    empty list."""
    return re.fullmatch(
        re.escape(pattern).replace("NAME", r"[\w-]+"), key
    ) is not None or pattern.startswith(f"{key}.")


@pytest.fixture
def few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that measures two products and two sums, and no blocks."""
    names = ("_products", "_convolutions", "_elementwise")
    products, _, sums = (getattr(calibrate_cpu, name) for name in names)
    for name, probes in zip(names, (products, lambda _: (), sums), strict=True):
        monkeypatch.setattr(calibrate_cpu, name, lambda dtype, probes=probes: [*probes(dtype)][:2])
    monkeypatch.setattr(calibrate_cpu, "_blocks", lambda _: ())
    monkeypatch.setattr(calibrate_cpu, "POOL_BYTES", 1 << 26)


@pytest.mark.sweep("more")
@pytest.mark.long
@pytest.mark.usefixtures("few_probes")
def test_every_key_is_documented_and_printed(graphrun: Cli) -> None:
    assert graphrun("plan", *SIM, "--vram", "6M", "-o", "plan.json")[0] == 0
    assert graphrun("plan", *SIM, "--vram", "12M", "-o", "large.json")[0] == 0
    assert graphrun("export", "plan.json", "--as", "accelerate", "-o", "maps.json")[0] == 0
    broken_plan = json.loads(Path("plan.json").read_text())
    broken_plan["actions"] = [
        re.sub(r"ring buffer [\d.]+ [KM]iB", "ring buffer 1 KiB", line)
        for line in broken_plan["actions"]
    ]
    Path("broken.json").write_text(json.dumps(broken_plan))
    Path("requests.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a dog", "steps": 0}\n')

    Path("cluster.yaml").write_text(
        "{graphrun: 1, hosts: {a: {ram: 8G, devices: [{id: 0, hardware: sim, vram: 6M}]}}}"
    )

    sections, printed = documented(), dict[str, set[str]]()
    for section, command in CASES:
        _, text, errors = graphrun(*command, "--json")
        assert text, (command, errors)
        output = json.loads(text)
        assert output.pop("version") == 1, command
        output_keys = set(keys(output))
        printed.setdefault(section, set()).update(output_keys)
    assert sections.keys() == {COMMON, *printed}
    assert sections[COMMON] == {"version"}
    unknown = {
        f"{section}: {key}"
        for section, section_keys in printed.items()
        for key in section_keys
        if not any(named_by(key, pattern) for pattern in sections[section])
    }
    assert unknown == set()
    unprinted = {
        f"{section}: {pattern}"
        for section, section_keys in printed.items()
        for pattern in sections[section]
        if not any(named_by(key, pattern) for key in section_keys)
    }
    assert unprinted <= NOT_HERE
