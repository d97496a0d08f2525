"""Split requests by an input that stages take item by item (``for_each``), and join the outputs.

    request 1: seeds [3, 5, 8]     items 1, 2, 3 run like any requests
    request 2: seeds [4]           item 4
    outputs of request 1: {image: [.., .., ..]}
    outputs of request 2: {image: [..]}

With a journal, outputs of finished items are stored next to its state (``3.made``) and survive a
kill.
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
    """The items of ``whole``, resolved requests for ``graph``, as ``requests`` of their own.

    Items are numbered from 1 through all lists. A broken request is one item. The method `sink`
    takes an item's outputs; after the last item of a request, the argument ``sink`` gets them as
    lists.
    """

    def __init__(
        self, graph: Graph, whole: Sequence[Request], sink: Sink | None, journal: Journal | None
    ) -> None:
        self._graph, self._sink, self._journal = graph, sink, journal
        self._request_of: dict[int, Request] = {}  # by item
        self._item_outputs: dict[int, Mapping[str, Any]] = {}  # by item, if there is no journal
        self._outputs: dict[int, Mapping[str, Any]] = {}  # by request, if there is no sink
        self.requests = [*self._split(whole)]
        self._items = {
            request.number: [item for item, source in self._request_of.items() if source is request]
            for request in whole
        }

    def _split(self, whole: Sequence[Request]) -> Iterator[Request]:
        name = self._graph.list_input
        for request in whole:
            values = (
                [None] if request.error else self._graph.inputs[name].items(request.inputs[name])
            )
            for index, value in enumerate(values, 1):
                self._request_of[number := len(self._request_of) + 1] = request
                label = request.location if request.error else f"{request.location}, item {index}"
                yield replace(
                    request, number=number, inputs={**request.inputs, name: value}, location=label
                )

    def sink(self, item: Request, outputs: Mapping[str, Any]) -> list[Path]:
        """Take the outputs of ``item``. Return the files of its request if all items are complete,
        else the file with this item's outputs."""
        request = self._request_of[item.number]
        if self._journal is None:
            self._item_outputs[item.number] = outputs
            return self._gather(request) or []
        self._item_journal(item.number).keep("outputs", outputs)
        files = self._gather(request)
        return (
            [self._item_journal(item.number).folder / "outputs.value"] if files is None else files
        )

    def finish(self, batch: Batch) -> Batch:
        """Return the batch of the requests, made from the items' ``batch``; the first error of an
        item counts."""
        for number in batch.done_before:  # killed before their outputs were collected
            if number == self._items[self._request_of[number].number][0]:
                self._gather(self._request_of[number])
        errors: dict[int, str] = {}
        for number, error in sorted(batch.errors.items()):
            request = self._request_of[number]
            index = self._items[request.number].index(number) + 1
            errors.setdefault(request.number, error if request.error else f"item {index}: {error}")
        finished_items = set(batch.done_before)
        finished_requests = tuple(
            number for number, items in self._items.items() if finished_items.issuperset(items)
        )
        return replace(batch, outputs=self._outputs, errors=errors, done_before=finished_requests)

    def _gather(self, request: Request) -> list[Path] | None:
        """Deliver the outputs of ``request``. Return the files; None if outputs of an item are
        missing."""
        item_outputs = list[Mapping[str, Any]]()
        for item in reversed(self._items[request.number]):  # the last item finishes last
            outputs = (
                self._item_outputs.get(item)
                if self._journal is None
                else self._item_journal(item).values("outputs")
            )
            if outputs is None:
                return None
            item_outputs.insert(0, outputs)
        lists = {
            name: bool(self._graph.stage(reference.name).for_each)
            for name, reference in self._graph.outputs.items()
        }
        outputs = {
            name: [item_output[name] for item_output in item_outputs]
            if is_list
            else item_outputs[0][name]
            for name, is_list in lists.items()
        }
        files = list[Path]()
        if self._sink is not None:
            files += self._sink(request, outputs)
        else:
            self._outputs[request.number] = outputs
        for item in self._items[request.number]:
            self._item_outputs.pop(item, None)
            if self._journal is not None:
                self._journal.request(item).finish(files)
                self._item_journal(item).tidy()
        return files

    def _item_journal(self, item: int) -> RequestJournal:
        assert self._journal is not None
        return RequestJournal(self._journal.folder / f"{item}.made")
