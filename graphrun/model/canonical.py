"""Canonical JSON of records, with sorted keys and no spaces, for digests.

Problems of one search share most of their records, so the JSON of `Canonical.shared` ones is kept.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MOST_KEPT = 128  # records


class Canonical:
    """Canonical JSON.

    ``fields_of``: returns the fields of a record. ``nested``: classes of records that contain
    ``shared`` records, which do not change.
    """

    def __init__(
        self,
        fields_of: Callable[[Any], dict[str, Any]],
        nested: tuple[type, ...],
        shared: tuple[type, ...],
    ) -> None:
        self._fields_of, self._nested, self._shared = fields_of, nested, shared
        # by `id`; with the record, so that no other record gets its `id`
        self._fragments: OrderedDict[int, tuple[Any, str]] = OrderedDict()

    def json(self, part: Any) -> str:
        if isinstance(part, self._nested):
            pairs = sorted(self._fields_of(part).items())
            items = ",".join(f'"{name}":{self.json(value)}' for name, value in pairs)
            return f"{{{items}}}"
        if isinstance(part, tuple):
            return f"[{','.join(map(self.json, part))}]"
        if not isinstance(part, self._shared):
            return json.dumps(part, default=self._fields_of, sort_keys=True, separators=(",", ":"))
        if (entry := self._fragments.get(id(part))) is None:
            entry = part, self.json(self._fields_of(part))
            self._fragments[id(part)] = entry
            if len(self._fragments) > MOST_KEPT:
                self._fragments.popitem(last=False)
        return entry[1]
