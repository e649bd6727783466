"""Bodies of OpenAI's HTTP interface, as far as they are served.

A field that would change the answer and is not served is refused, by name, unless it says what is done anyway; fields
that change nothing are taken. ``session`` and ``ignore_eos`` are of this server (the latter is known from others).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from compute.decode.sampler import Sampling
from compute.serve.errors import BadBody
from protocol.errors import InvalidValue

MOST_STOPS = 16
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
"""How the decoder says where in a body something is wrong."""
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A longer number is refused where it stands, not by whatever would count or print it."""

_BodyT = TypeVar("_BodyT", bound="Body")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream tells besides text. It has no padding to leave out.

    Progress is told in comments, for those who ask: not every reader of streams skips them.
    """

    include_usage: bool = False
    include_progress: bool = False
    include_obfuscation: bool | None = None


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What requests of both kinds have in common. None is the default of every field."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    max_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    session: str | None = None
    # One value is what is done anyway.
    n: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    # What changes nothing.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        """Of fields that are not served, the values that ask for nothing."""
        return {
            "n": (1,),
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "logit_bias": ({},),
            "top_k": (-1, 0),
            "min_p": (0,),
            "repetition_penalty": (1,),
        }

    def check(self) -> None:
        """Raises `InvalidValue`."""
        for name, allowed in self.neutral().items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                served = f"{' or '.join(map(repr, allowed))}; others are not served" if allowed else "null: not served"
                raise InvalidValue(name, value, served)
        if self.session is not None and not self.session:
            raise InvalidValue("session", self.session, "a name")
        if len(self.stops) > MOST_STOPS:
            raise InvalidValue("stop", len(self.stops), f"at most {MOST_STOPS} texts")
        if any(not stop for stop in self.stops):
            raise InvalidValue("stop", "", "texts that are not empty")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self, seed: int) -> Sampling:
        """As asked; with ``seed`` where none was. Raises `InvalidValue`."""
        return Sampling(
            1.0 if self.temperature is None else self.temperature,
            1.0 if self.top_p is None else self.top_p,
            seed if self.seed is None else self.seed,
        )


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content. Only text is served."""

    type: str
    text: str = ""


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: str
    content: str | list[Part] | None = None
    # Not served. A client that sends an answer back as it came has them, empty.
    name: Any = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None

    def plain(self, at: str) -> dict[str, str]:
        """Role and text; raises `InvalidValue` for anything else, as a field of ``at``."""
        if self.role not in ("system", "developer", "user", "assistant"):
            raise InvalidValue(f"{at}.role", self.role, "system, developer, user or assistant")
        for name in ("name", "refusal", "annotations", "audio", "function_call", "tool_calls"):
            if getattr(self, name):
                raise InvalidValue(f"{at}.{name}", getattr(self, name), "null: not served")
        parts = self.content if isinstance(self.content, list) else []
        for index, part in enumerate(parts):
            if part.type != "text":
                raise InvalidValue(f"{at}.content[{index}].type", part.type, "text")
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatBody(Body, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    modalities: list[str] | None = None
    reasoning_effort: Any = None

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral() | {
            "logprobs": (False,),
            "top_logprobs": (0,),
            "response_format": ({"type": "text"},),
            "tools": ([],),
            "tool_choice": ("none", "auto"),
            "modalities": (["text"],),
            "reasoning_effort": ("none",),
        }

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidValue("messages", 0, "at least one")

    def conversation(self) -> list[dict[str, str]]:
        """Role and text of each message. Raises `InvalidValue`."""
        return [message.plain(f"messages[{index}]") for index, message in enumerate(self.messages)]

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(Body, kw_only=True):
    """``POST /v1/completions``: one prompt, as text or as tokens."""

    prompt: str | list[Int64 | str]
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Int64 | None = None
    best_of: Int64 | None = None

    def neutral(self) -> dict[str, tuple[Any, ...]]:
        return super().neutral() | {"echo": (False,), "suffix": ("",), "logprobs": (), "best_of": (1,)}

    def one_prompt(self) -> str | list[int]:
        """Raises `InvalidValue` for none or several."""
        if isinstance(self.prompt, str):
            return self.prompt
        tokens = [part for part in self.prompt if isinstance(part, int)]
        texts = [part for part in self.prompt if isinstance(part, str)]
        if texts and (tokens or len(texts) > 1):
            raise InvalidValue("prompt", f"{len(texts)} texts and {len(tokens)} tokens", "one text, or tokens")
        return texts[0] if texts else tokens

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens


def decode(data: bytes, kind: type[_BodyT]) -> _BodyT:
    """``data`` as a body of ``kind``; raises `BadBody` or `InvalidValue`, naming what is wrong."""
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error)) from None
    except (ValueError, RecursionError) as error:  # no JSON, or longer numbers and deeper lists than Python's own
        raise BadBody("body", str(error)) from None
    body.check()
    return body


def _bad_field(message: str) -> BadBody:
    """What the decoder says of a field, with the field's path first."""
    reason, path = found.groups() if (found := _PLACE.fullmatch(message)) else (message, "")
    unknown = _UNKNOWN.fullmatch(reason)
    if unknown is not None:
        return BadBody(f"{path}.{unknown[1]}" if path else unknown[1], "unknown field")
    return BadBody(path or "body", reason)
