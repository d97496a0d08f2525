"""Refusals as in the OpenAI API: a status, and ``{"error": {"message", "type", "param",
"code"}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

KINDS = {
    401: "authentication_error",
    403: "request_forbidden",
    404: "not_found_error",
    429: "rate_limit_error",
}
KINDS |= {500: "server_error", 503: "server_error"}


class Refused(Exception):
    """A refused request. ``code``: a word for programs. ``param``: the field at fault.
    ``retry_seconds``: when another try may succeed. ``details``: further entries of the error."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        retry_seconds: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_seconds, self.details = retry_seconds, dict(details or {})

    @classmethod
    def stopping(cls) -> Refused:
        return cls(503, "the server is stopping", "stopping", retry_seconds=10)

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
                **self.details,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds (RFC 9110, 10.2.3), if another try may succeed."""
        return (
            {}
            if self.retry_seconds is None
            else {"Retry-After": str(max(1, math.ceil(self.retry_seconds)))}
        )
