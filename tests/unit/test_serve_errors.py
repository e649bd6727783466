"""Errors over HTTP: what docs/serve.md lists, and whether a client is to try again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compute.serve.http import RETRY_AFTER_S, _error
from compute.serve.replies import _STATUS
from protocol.errors import KvdError

DOCUMENT = Path(__file__).parents[2] / "docs" / "serve.md"


def listed() -> dict[str, int]:
    """Status by code, of the table in the document; what stands behind a code is not one."""
    rows = re.findall(r"^\| (\d{3}) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return {code: int(status) for status, codes in rows for code in re.findall(r"(?:^|, )`([a-z_]+)`", codes)}


def test_the_document_lists_every_code_with_its_status() -> None:
    assert listed() == _STATUS


@pytest.mark.parametrize(("code", "status"), _STATUS.items())
def test_clients_are_told_whether_to_try_again(code: str, status: int) -> None:
    error = KvdError("no")
    error.code = code  # type: ignore[misc]
    reply = _error(error)
    assert reply.status_code == status
    again = status in (429, 503)
    assert reply.headers.get("retry-after") == (RETRY_AFTER_S if again else None)
    assert reply.headers.get("x-should-retry") == (None if again else "false")
