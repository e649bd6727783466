"""What a fault of the daemon leaves in the log: where it was, and not what was said there."""

from __future__ import annotations

import pytest

from kvd import logs
from kvd.config import LogConfig


@pytest.mark.parametrize("kind", ["console", "json"])
def test_a_traceback_has_no_values_of_variables(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.configure(LogConfig(format=kind))

    def fail(prompt: str) -> None:
        raise ValueError(len(prompt))

    try:
        fail("what somebody " + "said to a model")
    except ValueError:
        log.exception("request failed")
    text = capsys.readouterr().err
    assert "request failed" in text
    assert "ValueError" in text
    assert "test_logs.py" in text
    assert "said to a model" not in text.replace('"what somebody " + "said to a model"', "")
