"""Requests with a list that stages take item by item (``for_each``), as one request for each item;
their outputs as lists again.

    request 1: seeds [3, 5, 8]     items 1, 2, 3 run like any requests      outputs of request 1:
    {image: [.., .., ..]} request 2: seeds [4]           item 4
    outputs of request 2: {image: [..]}

With a journal, outputs of finished items wait beside its state (``3.made``), and survive a kill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphrun.batch.journal import Journal, RequestJournal
from graphrun.batch.queue import Batch, Sink
from graphrun.batch.requests import Request
from graphrun.graph.graph import Graph


class Items:
    """The items of ``whole``, resolved requests for ``graph``, as ``requests`` of their own,
    numbered from 1 through all lists. A broken one is one item.

    `sink` takes their outputs. Once it has those of all items of a request, ``sink`` gets them as
    lists.
    """

    def __init__(
        self, graph: Graph, whole: Sequence[Request], sink: Sink | None, journal: Journal | None
    ) -> None:
        self._graph, self._sink, self._journal = graph, sink, journal
        self._of: dict[int, Request] = {}  # the request of each item
        self._made: dict[int, Mapping[str, Any]] = {}  # by item, where there is no journal
        self._outputs: dict[int, Mapping[str, Any]] = {}  # by request, where there is no sink
        self.requests = [*self._listed(whole)]
        self._items = {
            request.number: [item for item, of in self._of.items() if of is request]
            for request in whole
        }

    def _listed(self, whole: Sequence[Request]) -> Iterator[Request]:
        name = self._graph.list_input
        for request in whole:
            values = (
                [None] if request.error else self._graph.inputs[name].items(request.inputs[name])
            )
            for index, value in enumerate(values, 1):
                self._of[number := len(self._of) + 1] = request
                where = request.where if request.error else f"{request.where}, item {index}"
                yield replace(
                    request, number=number, inputs={**request.inputs, name: value}, where=where
                )

    def sink(self, item: Request, outputs: Mapping[str, Any]) -> list[Path]:
        """Takes the outputs of ``item``. Returns the files of its request where these are all, else
        the file that holds them."""
        request = self._of[item.number]
        if self._journal is None:
            self._made[item.number] = outputs
            return self._gathered(request) or []
        self._kept(item.number).keep("outputs", outputs)
        files = self._gathered(request)
        return [self._kept(item.number).folder / "outputs.value"] if files is None else files

    def finish(self, batch: Batch) -> Batch:
        """The batch of the requests, where ``batch`` is that of the items. The error of a request
        is the first of its items'."""
        for number in batch.done_before:  # killed before they were gathered
            if number == self._items[self._of[number].number][0]:
                self._gathered(self._of[number])
        errors: dict[int, str] = {}
        for number, error in sorted(batch.errors.items()):
            request = self._of[number]
            index = self._items[request.number].index(number) + 1
            errors.setdefault(request.number, error if request.error else f"item {index}: {error}")
        before = set(batch.done_before)
        done = tuple(number for number, items in self._items.items() if before.issuperset(items))
        return replace(batch, outputs=self._outputs, errors=errors, done_before=done)

    def _gathered(self, request: Request) -> list[Path] | None:
        """Hands on the outputs of ``request``; returns the files that were written, None where
        outputs of an item are missing."""
        found = list[Mapping[str, Any]]()
        for item in reversed(self._items[request.number]):  # the last one is made last
            outputs = (
                self._made.get(item)
                if self._journal is None
                else self._kept(item).values("outputs")
            )
            if outputs is None:
                return None
            found.insert(0, outputs)
        lists = {
            name: bool(self._graph.stage(of.name).for_each)
            for name, of in self._graph.outputs.items()
        }
        outputs = {
            name: [each[name] for each in found] if many else found[0][name]
            for name, many in lists.items()
        }
        files = list[Path]()
        if self._sink is not None:
            files += self._sink(request, outputs)
        else:
            self._outputs[request.number] = outputs
        for item in self._items[request.number]:
            self._made.pop(item, None)
            if self._journal is not None:
                self._journal.request(item).finish(files)
                self._kept(item).tidy()
        return files

    def _kept(self, item: int) -> RequestJournal:
        """Where the outputs of ``item`` wait."""
        assert self._journal is not None
        return RequestJournal(self._journal.folder / f"{item}.made")
