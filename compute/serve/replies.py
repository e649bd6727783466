"""Bodies of replies and errors, in OpenAI's shape. What is ours beside it is under ``kvd`` and ``facts``."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from compute.serve.requests import Finished, Request, Usage
from protocol.errors import KvdError

_STATUS = {
    "invalid_body": 400,
    "invalid_value": 400,
    "context_length_exceeded": 400,
    "fingerprint_mismatch": 400,
    "invalid_api_key": 401,
    "permission_refused": 403,
    "unknown_session": 404,
    "model_not_found": 404,
    "refused": 404,
    "session_busy": 409,
    "session_exists": 409,
    "queue_full": 429,
    "queue_timeout": 503,
    "shutting_down": 503,
    "draining": 503,
    "daemon_unavailable": 503,
    "peer_lost": 503,
    "out_of_capacity": 507,
}


def status_of(error: Exception) -> int:
    """The HTTP status of ``error``; 500 where it is nobody's fault but ours."""
    return _STATUS.get(getattr(error, "code", ""), 500)


def error_body(error: Exception) -> dict[str, Any]:
    """``error`` as OpenAI's clients read it, with its facts."""
    status = status_of(error)
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    facts = error.facts if isinstance(error, KvdError) else {}
    return {
        "error": {
            "message": error.message if isinstance(error, KvdError) else f"{type(error).__name__}: {error}",
            "type": kind.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": facts.get("what"),
            "code": getattr(error, "code", "internal"),
            "facts": facts,
        }
    }


@dataclass(frozen=True)
class Reply:
    """Makes the bodies of one reply."""

    chat: bool
    identity: str
    created: int
    model: str
    fingerprint: str
    session: str | None

    def opening(self) -> dict[str, Any] | None:
        """What comes before the first text of a stream."""
        return self._piece({"role": "assistant", "content": ""}, None) if self.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        return self._piece({"content": text} if self.chat else text, None)

    def last_piece(self, finished: Finished) -> dict[str, Any]:
        return self._piece({} if self.chat else "", finished) | {"kvd": self._ours(finished.usage)}

    def usage_piece(self, finished: Finished) -> dict[str, Any]:
        return self._head(chunk=True) | {"choices": [], "usage": _usage(finished.usage)}

    def whole(self, text: str, finished: Finished) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": _reason(finished), "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        body = self._head(chunk=False) | {"choices": [choice], "usage": _usage(finished.usage)}
        return body | {"kvd": self._ours(finished.usage)}

    def _piece(self, content: dict[str, str] | str, finished: Finished | None) -> dict[str, Any]:
        reason = None if finished is None else _reason(finished)
        choice = {"index": 0, "delta" if self.chat else "text": content, "finish_reason": reason, "logprobs": None}
        return self._head(chunk=True) | {"choices": [choice]}

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _ours(self, usage: Usage) -> dict[str, Any]:
        return {
            "session": self.session,
            "history_tokens": usage.prompt + usage.output,
            "steps": usage.steps,
            "queued_s": round(usage.queued_s, 6),
            "first_token_s": round(usage.first_token_s, 6),
            "decode_s": round(usage.decode_s, 6),
        }


def chat_reply(model: str, fingerprint: str, request: Request) -> Reply:
    return Reply(True, f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model, fingerprint, request.session)


def completion_reply(model: str, fingerprint: str, request: Request) -> Reply:
    return Reply(False, f"cmpl-{secrets.token_hex(12)}", int(time.time()), model, fingerprint, request.session)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _reason(finished: Finished) -> str:
    """``cancelled`` is not among OpenAI's: a client that reads it has not gone, so the server ended it."""
    return "stop" if finished.reason == "cancelled" else finished.reason
