"""Which stages of a graph need not run because their outputs are kept, and keeping those of the stages that do.

Decides what is looked for and what is kept; a folder that will not do stops no run. Knows no plan and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from graphrun.batch.cache.index import Index
from graphrun.batch.cache.keys import Keys, Way, kept_kinds
from graphrun.batch.cache.pack import pack, unpack
from graphrun.errors import InputError
from graphrun.graph.graph import Graph, Stage
from graphrun.model.problem import Hardware

What = Literal["encoded", "all", "none"]


class Reuse:
    """The kept outputs of ``graph`` for resolved ``inputs`` on ``device``, in ``index``.

    ``what``: ``encoded`` takes what `encode_prompt` returns, ``all`` takes latents too. ``allow``: as for a plan. ``note`` is told,
    once, why nothing is kept, where the folder will not do.
    """

    def __init__(
        self,
        index: Index,
        graph: Graph,
        inputs: Mapping[str, Any],
        device: str,
        *,
        what: What = "encoded",
        allow: Collection[str] = (),
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.index, self.graph, self.what, self.allow = index, graph, what, allow
        self.keys = Keys(graph, inputs, device, index.file_digest)
        self._note = note

    def takes(self, stage: Stage) -> bool:
        """Whether outputs of ``stage`` are looked for and kept."""
        return kept_kinds(stage) and (self.what == "all" or (self.what == "encoded" and stage.op == "encode_prompt"))

    def find(self) -> dict[str, Any]:
        """Values of the stages that need not run, by name as in ``encode.embeds``: of those that others read, nothing more.

        Stages whose outputs are the graph's own run in any case.
        """
        found: dict[str, Any] = {}
        needed = {reference.name for reference in self.graph.outputs.values()}
        last = set(needed)
        for stage in reversed(self.graph.stages):  # consumers before producers
            if stage.name not in needed:
                continue
            outputs = self._look(stage) if stage.name not in last else None
            if outputs is not None:
                found.update({f"{stage.name}.{name}": value for name, value in outputs.items()})
            else:
                needed |= set(self.graph.producers(stage.name))
        return found

    def keep(self, stage: str, outputs: Mapping[str, Any], way: Way | None = None) -> None:
        """Keeps the ``outputs`` of ``stage``, which was run in ``way``, where they are what is kept."""
        if stage not in {each.name for each in self.graph.stages} or not self.takes(self.graph.stage(stage)):
            return
        key = self.keys.key(stage, way)
        if key is None:
            return
        try:
            self.index.put(key, pack(dict(outputs)), graph=self.graph.name, stage=stage, about=self.keys.about(stage))
        except InputError as error:
            self._complain(error)

    def _look(self, stage: Stage) -> dict[str, Any] | None:
        if not self.takes(stage):
            return None
        for way in self.keys.ways(stage.name, self.allow):
            if (key := self.keys.key(stage.name, way)) is None:
                return None
            try:
                data = self.index.get(key)
                if data is not None:
                    return dict(unpack(data))
            except InputError as error:
                self._complain(error)
                return None
        return None

    def _complain(self, error: InputError) -> None:
        if self._note is not None:
            self._note(str(error))
            self._note = None


def reuse_for(
    graph: Graph,
    values: Mapping[str, Any],
    hardware: Hardware,
    cache: Path,
    what: What,
    allow: Iterable[str],
    note: Callable[[str], None] | None = None,
) -> Reuse:
    """The outputs that the folder ``cache`` holds for runs of ``graph`` on ``hardware`` with the input ``values``."""
    device = f"{hardware.device} {hardware.name}"
    return Reuse(Index(cache / "outputs"), graph, values, device, what=what, allow=tuple(allow), note=note)
