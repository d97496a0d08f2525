"""Look up cached stage outputs for a run, and cache the outputs of the stages that run. An unusable
cache folder is reported once and never fails a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from graphrun.batch.cache.keys import Choices, StageKeys, cacheable
from graphrun.batch.cache.pack import pack, unpack
from graphrun.disk_store import Store
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Stage
from graphrun.units import GIB

What = Literal["encoded", "all", "none"]

# embeddings of a FLUX prompt take 4 MiB, so this is enough for about a thousand prompts
LIMIT_BYTES = 4 * GIB


class Reuse:
    """The cached outputs of ``graph`` for resolved ``inputs`` on ``device``, in ``store``.

    ``scope``: ``encoded`` caches the outputs of `encode_prompt`, ``all`` also latents. ``allow``:
    as for a plan. ``note``: called once with the reason if the cache folder cannot be used.
    """

    def __init__(
        self,
        store: Store,
        graph: Graph,
        inputs: Mapping[str, Any],
        device: str,
        *,
        scope: What = "encoded",
        allow: Collection[str] = (),
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.store, self.graph, self.scope, self.allow = store, graph, scope, allow
        self.keys = StageKeys(graph, inputs, device, store.file_digest)
        self._note = note

    def takes(self, stage: Stage) -> bool:
        """Whether outputs of ``stage`` are looked up and cached."""
        return cacheable(stage) and (
            self.scope == "all" or (self.scope == "encoded" and stage.op == "encode_prompt")
        )

    def find(self) -> dict[str, Any]:
        """Return the cached outputs of stages that need not run, by name such as ``encode.embeds``.

        Stages that only a cached stage needs are omitted. Stages with the graph's outputs always
        run.
        """
        values: dict[str, Any] = {}
        last = {reference.name for reference in self.graph.outputs.values()}
        required = set(last)
        for stage in reversed(self.graph.stages):  # consumers before producers
            if stage.name in required:
                outputs = (
                    self._look(stage) if stage.name not in last and self.takes(stage) else None
                )
                if outputs is None:
                    required |= set(self.graph.producers(stage.name))
                else:
                    values |= {f"{stage.name}.{name}": value for name, value in outputs.items()}
        return values

    def keep(self, stage: str, outputs: Mapping[str, Any], choices: Choices | None = None) -> None:
        """Cache the ``outputs`` of ``stage``, which ran with ``choices``, if `takes` allows it."""
        if not any(
            candidate.name == stage and self.takes(candidate) for candidate in self.graph.stages
        ):
            return
        if (key := self.keys.key(stage, choices)) is not None:
            try:
                self.store.put(
                    key,
                    pack(dict(outputs)),
                    graph=self.graph.name,
                    stage=stage,
                    inputs_text=self.keys.about(stage),
                )
            except InputError as error:
                self._report(error)

    def _look(self, stage: Stage) -> dict[str, Any] | None:
        try:
            for choices in self.keys.candidates(stage.name, self.allow):
                if (key := self.keys.key(stage.name, choices)) is None:
                    return None
                if (data := self.store.get(key)) is not None:
                    return dict(unpack(data))
        except InputError as error:
            self._report(error)
        except (TypeError, ValueError):  # the cached value is no mapping
            self._report(
                InputError(
                    f"{self.store.folder}: the entry of {stage.name} is damaged; "
                    "remove it: graphrun cache rm"
                )
            )
        return None

    def _report(self, error: InputError) -> None:
        if self._note is not None:
            self._note(str(error))
            self._note = None


def output_store(cache: Path) -> Store:
    """Return the store of stage outputs in the folder ``cache``."""
    return Store(cache / "outputs", LIMIT_BYTES)


def reuse_for(
    graph: Graph,
    values: Mapping[str, Any],
    device_name: str,
    cache: Path,
    scope: What,
    allow: Iterable[str],
    note: Callable[[str], None] | None = None,
) -> Reuse:
    """Return the cached outputs in the folder ``cache`` for runs of ``graph`` with ``values``.
    ``device_name``: `Hardware.label`; of several devices all labels."""
    return Reuse(
        output_store(cache),
        graph,
        values,
        device_name,
        scope=scope,
        allow=tuple(allow),
        note=note,
    )
