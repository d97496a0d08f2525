"""What the planner does for sizes that cannot fit: it counts dry runs and solves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from graphrun import store
from graphrun.profile.hardware import hardware
from graphrun.serve import planner
from graphrun.serve.catalog import Catalog
from graphrun.serve.plans import default_shape
from graphrun.serve.settings import Settings
from graphrun.solve import linear

pytestmark = [pytest.mark.long, pytest.mark.sweep("more")]


class Work:
    """The planner's end of a connection. ``counts``: dry runs and solves until each answer."""

    def __init__(self, settings: Settings, sizes: list[int], monkeypatch: pytest.MonkeyPatch):
        variant = Catalog.read(settings).variants["flux-tiny"]
        defaults = variant.graph.for_planning({})
        inputs = {name: defaults[name] for name, _ in default_shape(variant).settings}
        self._messages: list[tuple[str, Mapping[str, Any]]] = [
            (
                "plan",
                {
                    "key": size,
                    "variant": variant,
                    "inputs": {**inputs, **({"height": size, "width": size} if size else {})},
                    "share": 1.0,
                },
            )
            for size in sizes
        ]
        self._messages.append(("stop", {}))
        self.answers = list[Any]()
        self.counts = list[dict[str, int]]()
        self._count = Counter[str]()
        for name, module, function in (("dry", store, "_probe"), ("solve", linear, "_run")):
            self._counting(name, module, function, monkeypatch)

    def _counting(self, name: str, module: Any, function: str, patch: pytest.MonkeyPatch) -> None:
        original = getattr(module, function)

        def count(*arguments: Any, **options: Any) -> Any:
            self._count[name] += 1
            return original(*arguments, **options)

        patch.setattr(module, function, count)

    def recv(self) -> Any:
        self._count.clear()  # what the planner does without a message is not counted
        return self._messages.pop(0)

    def poll(self) -> bool:
        return False

    def send(self, message: Any) -> None:
        self.answers.append(message)
        self.counts.append(dict(self._count))


def test_sizes_that_cannot_fit_take_no_solve_and_larger_ones_no_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = {"vram": 3 * 2**20, "ram": 2**33}
    options = (tmp_path / "cache", "none", tmp_path, {}, "1")
    settings = Settings((Path("flux-tiny"),), (), budgets, (hardware("sim"),), *options)
    connection: Any = Work(settings, [0, 192, 208, 256, 512], monkeypatch)
    planner.plan_forever(connection, settings)
    kinds = [kind for kind, _ in connection.answers]
    assert kinds == ["planned", "unfit", "unfit", "unfit", "unfit"]
    assert connection.counts[0]["solve"]
    # 256, twice the default, was found while no message waited
    assert connection.counts[1:] == [{"dry": 1}, {}, {}, {}]
    messages = [content["message"] for _, content in connection.answers[1:]]
    assert messages[0].startswith(
        "flux-tiny: size=128x128 would fit; for size=192x192 nothing fits: "
    )
    assert "nothing fits: even with size=192x192, " in messages[1]
    for _, content in connection.answers[1:]:
        (suggestion,) = content["details"]["suggestions"]
        assert suggestion["change"] == ["--set height=128", "--set width=128"]
