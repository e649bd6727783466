"""``kvd-worker serve`` as its users meet it: OpenAI's own client, raw HTTP, and signals."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from compute.cli import main, parser
from compute.model_arguments import hot_rows_of
from protocol.model import model_named
from tests.blackbox.daemon_process import DaemonProcess
from tests.blackbox.server_process import Server
from tests.unit.test_serve_text import checkpoint

pytestmark = pytest.mark.leaks_per_module


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/tmp"))
    run_dir = folder / "run"
    run_dir.mkdir(mode=0o700)
    sizes = {"host_capacity": "64MiB", "vram_capacity": "256MiB", "drain_timeout_s": "0"}
    with DaemonProcess(run_dir, **sizes) as daemon:
        daemon.wait_ready()
        started = Server.start(run_dir, folder, "--running", "4", "--queue", "4")
        try:
            yield started.ready()
            assert started.end() == 0, started.log.read_text()
            assert "Traceback" not in started.log.read_text()
            stats = daemon.stat()
            assert stats.ledger == "balanced"
            assert not stats.leases
            assert {session.state for session in stats.sessions} <= {"stored"}
            assert all(not session.name.startswith("request-") for session in stats.sessions)
            assert all(tier.requested == 0 for tier in stats.tiers if tier.tier.startswith("vram"))
        finally:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait()
    shutil.rmtree(folder)


HELLO: list[Any] = [{"role": "user", "content": "Hello there, who are you?"}]


def test_chat_whole_and_streamed_are_the_same(server: Server) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == ["small"]
        assert client.models.retrieve("small").model_extra == {"max_model_len": 1024}
        options: dict[str, Any] = {"model": "small", "messages": HELLO, "max_tokens": 20, "seed": 7, "temperature": 0.8}
        whole = client.chat.completions.create(**options)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 20
        assert whole.usage.prompt_tokens == len("user: Hello there, who are you?\nassistant: ")
        assert whole.choices[0].finish_reason == "length"
        stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 20
        other = client.chat.completions.create(**(options | {"seed": 8}))
        assert other.choices[0].message.content != text


def test_completions_of_text_and_of_tokens_are_the_same(server: Server) -> None:
    with server.client() as client:
        options: dict[str, Any] = {"model": "small", "max_tokens": 12, "temperature": 0}
        text = client.completions.create(prompt="Once upon a time", **options)
        tokens = client.completions.create(prompt=list(b"Once upon a time"), **options)
        assert text.choices[0].text == tokens.choices[0].text
        pieces = list(client.completions.create(prompt="Once upon a time", stream=True, **options))
        assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text


def test_a_stop_ends_the_text_before_it(server: Server) -> None:
    with server.client() as client:
        options: dict[str, Any] = {"model": "small", "prompt": "Stop", "max_tokens": 30, "temperature": 0}
        text = client.completions.create(**options).choices[0].text
        stop = text[9:11]
        stopped = client.completions.create(**options, stop=["never in it", stop]).choices[0]
        assert stopped.text == text[: text.index(stop)]
        assert stopped.finish_reason == "stop"


def test_a_session_is_ended(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 2, "session": "ended"}
    assert server.ask("POST", "/v1/completions", json.dumps(body).encode())[0] == 200
    path = "/v1/sessions/ended"
    assert server.ask("DELETE", path) == (200, {"id": "ended", "object": "session.deleted", "deleted": True})
    status, reply = server.ask("DELETE", path)
    assert (status, reply["error"]["code"]) == (404, "unknown_session")


def test_a_session_is_gone_on_with(server: Server) -> None:
    """The same text, whether the history is sent again or stored."""
    with server.client() as client:
        options: dict[str, Any] = {"model": "small", "max_tokens": 8, "temperature": 0}
        first = client.completions.create(prompt="a" * 100, extra_body={"session": "talk"}, **options)
        second = client.completions.create(prompt="and then", extra_body={"session": "talk"}, **options)
        assert second.usage is not None
        assert second.usage.prompt_tokens == 100 + 8 + 8
        assert second.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details.cached_tokens == 107
        assert second.model_extra is not None
        assert second.model_extra["kvd"]["session"] == "talk"
        assert second.model_extra["kvd"]["history_tokens"] == 124
        text = first.choices[0].text
        if "�" not in text:
            again = client.completions.create(prompt="a" * 100 + text + "and then", **options)
            assert again.choices[0].text == second.choices[0].text
            assert again.usage is not None
            assert again.usage.prompt_tokens_details is not None
            assert again.usage.prompt_tokens_details.cached_tokens == 64
        chat = client.chat.completions.create(
            model="small", messages=HELLO, max_tokens=4, extra_body={"session": "talk"}
        )
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == 124 + len("\nuser: Hello there, who are you?\nassistant: ")


def test_many_at_once_get_what_each_gets_alone(server: Server) -> None:
    def ask(index: int) -> str:
        with server.client() as client:
            return (
                client.completions.create(
                    model="small", prompt=f"{index} " * (5 + 9 * index), max_tokens=10, temperature=0.7, seed=index
                )
                .choices[0]
                .text
            )

    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(ask, range(5)))
    assert together == [ask(index) for index in range(5)]


def test_progress_is_told_in_comments_to_who_asks(server: Server) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    for options in ({"include_progress": True}, None):
        body = {"prompt": "y" * 300, "max_tokens": 3, "stream": True, "temperature": 0, "stream_options": options}
        connection.request("POST", "/v1/completions", json.dumps(body).encode())
        reply = connection.getresponse()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.read().decode().split("\n\n")
        if options:
            assert re.fullmatch(r": prompt, \d+ of 300 tokens read, 0 cached", lines[0])
        else:
            assert all(line.startswith("data: ") for line in lines[:-1]), "comments were not asked for"
        assert lines[-2:] == ["data: [DONE]", ""]
        assert json.loads(lines[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    connection.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("completions", {"prompt": "x", "n": 2}, 400, "n is 2; allowed: 1"),
        ("completions", {"prompt": "x", "echo": True}, 400, "echo is True"),
        ("completions", {"prompt": ["x", "y"]}, 400, "one text, or tokens"),
        ("completions", {"prompt": ["x", 3]}, 400, "one text, or tokens"),
        ("completions", {"prompt": ""}, 400, "prompt's tokens is 0"),
        ("completions", {"prompt": [300]}, 400, "token is 300; allowed: 0 to 255"),
        ("completions", {"prompt": [-1]}, 400, "token is -1"),
        ("completions", {"prompt": "x", "temperature": 3}, 400, "temperature is 3.0; allowed: 0 to 2"),
        ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p is 0"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens is 0"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "surprise": 1}, 400, "surprise"),
        ("completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
        ("completions", {"prompt": "x", "model": "gpt-5"}, 404, "'gpt-5' is not served; 'small' is"),
        ("completions", {"prompt": "x" * 1020, "max_tokens": 10}, 400, "the limit is 1024"),
        ("completions", {"prompt": "x", "session": ""}, 400, "session"),
        ("completions", {"prompt": "x", "session": "s" * 300}, 400, "name"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ("chat/completions", {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "tools"),
        ("chat/completions", {"messages": HELLO, "logprobs": True}, 400, "logprobs"),
        ("chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("nothing", {}, 404, "/v1/nothing is not served"),
    ],
)
def test_what_is_not_served_is_refused(
    server: Server, path: str, body: dict[str, Any], status: int, words: str
) -> None:
    got, reply = server.ask("POST", f"/v1/{path}", json.dumps(body).encode())
    assert got == status, reply
    assert words in reply["error"]["message"]
    assert set(reply["error"]) == {"message", "type", "param", "code", "facts"}


def test_what_is_no_json_is_refused(server: Server) -> None:
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000):
        status, reply = server.ask("POST", "/v1/completions", body)
        assert status == 400
        assert reply["error"]["code"] == "invalid_body"
    assert server.ask("GET", "/v1/completions")[0] == 405
    assert server.ask("GET", "/healthz") == (200, {"status": "ok"})


def test_errors_are_those_of_the_client_library(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="small", prompt="x" * 1020, max_tokens=10)
        assert caught.value.code == "context_length_exceeded"
        body: Any = caught.value.body
        assert body["facts"] == {"history": 0, "prompt": 1020, "output": 10, "limit": 1024}
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--listen", "nowhere"], 64, "--listen is 'nowhere'; allowed: HOST:PORT or unix:PATH"),
        (["--mtp", "2"], 64, "the model has no MTP layer"),
        (["--batch", "many"], 64, "--batch is 'many'; allowed: a number, or auto"),
        (["--batch", "9" * 5000], 64, "allowed: a number, or auto"),
        (["--batch", "0"], 64, "batch is 0; allowed: 1 to 16"),
        (["--batch", "-1"], 64, "batch is -1; allowed: 1 to 16"),
        (["--chunk", "0"], 64, "--chunk is 0; allowed: at least 1"),
        (["--chunk", "-64"], 64, "--chunk is -64; allowed: at least 1"),
        (["--ring-pages", "0"], 64, "--ring-pages is 0; allowed: at least 1"),
        (["--hot-rows", "255"], 64, "--hot-rows is 255; allowed: at least 256: 1 query rows of 256 selected rows each"),
        (["--shutdown-timeout", "-1"], 64, "--shutdown-timeout is -1; allowed: at least 0"),
        (["--daemon-timeout", "nan"], 64, "--daemon-timeout is nan; allowed: at least 0"),
        (["--queue-timeout", "nan"], 64, "above 0"),
        (["--running", "17"], 64, "running is 17; allowed: 1 to 16"),
        (["--token-gap", "0"], 64, "above 0"),
        (["--model", "glm-5.3"], 64, "a folder with a tokenizer.json, for 154,880 tokens"),
        (["--tokenizer", "/nonexistent"], 64, "tokenizer is '/nonexistent'"),
        (["--api-key-file", "/dev/null"], 64, "a file with a key in it"),
        (["--listen", "unix:/nonexistent/socket"], 71, "No such file or directory"),
        (["--run-dir", "/nonexistent", "--listen", "127.0.0.1:0"], 69, "no daemon at"),
    ],
)
def test_arguments_that_cannot_be_right(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == status
    assert words in capsys.readouterr().err


def test_a_file_where_the_socket_is_to_be_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "precious"
    path.write_text("kept")
    assert main(["serve", "--listen", f"unix:{path}"]) == 71
    assert f"--listen unix:{path}: a file that is not a socket is there" in capsys.readouterr().err
    assert path.read_text() == "kept"


EXAMPLES = re.findall(
    r"kvd-worker (serve .*?)(?: +#.*|\\n|'.*)?$",
    "\n".join(
        (Path(__file__).parents[2] / name).read_text()
        for name in ("compute/serve/command.py", "docs/serve.md", "docs/install.md", "systemd/kvd-worker@.service")
    ),
    re.MULTILINE,
)


@pytest.mark.parametrize("example", [line for line in EXAMPLES if "--weights" in line])
def test_examples_with_weights_get_as_far_as_the_device(
    tmp_path: Path, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They name the model that the weights are of, and give it as many hot rows as it needs."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here, on which the examples would load a model and serve it")
    glm = model_named("glm-5.3")
    checkpoint(tmp_path)
    config = {name: value for name, value in asdict(glm).items() if name != "rope_scaling"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "glm_moe_dsa"}))
    arguments = [re.sub(r"^(/srv)?/models/glm$", str(tmp_path), word) for word in shlex.split(example)]
    named = parser().parse_args(arguments)
    assert (model_named(named.model), named.weights) == (glm, tmp_path)
    assert hot_rows_of(named, glm, 3) >= 4 * 2048
    assert main([*arguments, "--listen", "127.0.0.1:0"]) == 69
    assert "cuda" in capsys.readouterr().err


def test_there_are_such_examples() -> None:
    assert len([line for line in EXAMPLES if "--weights" in line]) == 4
