"""Files of converted weights that are kept for later runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphrun.runtime.spool import Spool


def test_a_kept_file_without_a_digest_is_damaged(tmp_path: Path) -> None:
    headers = dict[str, Any](list=[], no_digest={"__metadata__": {}}, no_metadata={}, none=None)
    for name, header in headers.items():
        text = b"" if header is None else json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    assert [file.stem for file in Spool(keep=tmp_path).damaged()] == list(headers)
