"""The server, by OpenAI's own client on the loopback device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from tiny_gguf import reference, write

import pliant
from pliant.language.batch import Batch
from pliant.language.caches import token_bytes
from pliant.serving.app import Server, ServerSettings

PROMPTS = ("the ant", "on 1 day\nin the", "a", "in the on the ant " * 20)
HTTP = httpx.Client(timeout=60)
MESSAGES: Any = [{"role": "user", "content": "the?"}]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> pliant.LanguageModel:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path, reference("llama", True), "q8_0", "llama")
    return pliant.load_gguf(path, threads=2)


@contextlib.contextmanager
def served(
    lm: pliant.LanguageModel, grace: int = 5, **more: Any
) -> Iterator[tuple[str, Server, uvicorn.Server]]:
    settings = ServerSettings("tiny", 12, more.pop("most_waiting", 1000))
    server = Server(Batch(lm, **more), settings)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        lifespan="on",
        timeout_graceful_shutdown=grace,
    )
    web = uvicorn.Server(config)
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: web.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server, web
    finally:
        web.should_exit = True
        thread.join()
        listener.close()
        lm.model.memory_limit = None


def until(done: Callable[[], Any]) -> None:
    for _ in range(6000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen in a minute")


@pytest.fixture(scope="module")
def url(lm: pliant.LanguageModel) -> Iterator[str]:
    with served(lm) as (url, *_):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def metric(url: str, name: str) -> float:
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name} "))
    return float(line.split()[-1])


def test_completions(lm: pliant.LanguageModel, client: openai.OpenAI) -> None:
    for prompt in PROMPTS:
        want = lm.generate(prompt, 9)
        made = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=9, temperature=0
        )
        (choice,) = made.choices
        assert choice.text == want
        ids = len(lm.tokens.encode(prompt))
        assert made.usage is not None
        assert made.usage.prompt_tokens == ids
        assert made.usage.total_tokens == ids + made.usage.completion_tokens
        parts = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=9, temperature=0, stream=True
        )
        found = [part.choices[0] for part in parts]
        assert "".join(c.text for c in found) == want
        assert found[-1].finish_reason == choice.finish_reason


def test_a_default_that_the_context_has(client: openai.OpenAI) -> None:
    """Of 512 tokens, 505 of them a prompt; the server's default is 12 new ones."""
    made = client.completions.create(model="tiny", prompt=[1] * 505, temperature=0)
    assert made.usage is not None
    assert made.usage.prompt_tokens == 505
    assert made.choices[0].finish_reason in ("stop", "length")


def test_several_prompts_and_choices(
    lm: pliant.LanguageModel, client: openai.OpenAI
) -> None:
    ids = lm.tokens.encode(PROMPTS[1])
    want = lm.generate(PROMPTS, 5)
    made = client.completions.create(
        model="tiny", prompt=list(PROMPTS), max_tokens=5, temperature=0
    )
    assert [c.text for c in made.choices] == want
    assert [c.index for c in made.choices] == [0, 1, 2, 3]
    made = client.completions.create(
        model="tiny", prompt=[ids, ids], max_tokens=5, temperature=0, n=2
    )
    assert [c.text for c in made.choices] == [want[1]] * 4
    drawn = [
        [
            c.text
            for c in client.completions.create(
                model="tiny", prompt="the", max_tokens=8, n=3, seed=5
            ).choices
        ]
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1
    assert drawn[0][1] == lm.generate("the", 8, temperature=1.0, seed=6)


def test_chat(lm: pliant.LanguageModel, client: openai.OpenAI) -> None:
    text = lm.tokens.chat(MESSAGES)
    want = lm.generate(text, 10)
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    made = client.chat.completions.create(**asked, max_tokens=10)
    assert made.choices[0].message.content == want
    assert made.choices[0].message.role == "assistant"
    parts = list(
        client.chat.completions.create(
            **asked,
            max_completion_tokens=10,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *parts, last = parts
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(lm.tokens.encode(text))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in parts) == want
    assert [p.choices[0].finish_reason for p in parts][-1] in ("stop", "length")
    parted = [{"role": "user", "content": [{"type": "text", "text": "the?"}]}]
    made = client.chat.completions.create(
        **{**asked, "messages": parted}, max_tokens=10
    )
    assert made.choices[0].message.content == want
    made = client.chat.completions.create(**asked)  # as many as the server's default
    assert made.choices[0].message.content == lm.generate(text, 12)


def test_stop(lm: pliant.LanguageModel, client: openai.OpenAI) -> None:
    whole = lm.generate("the ant", 12)
    end = whole[3:5]
    for stop in (end, ["never there", end]):
        asked: dict[str, Any] = {"prompt": "the ant", "max_tokens": 12, "stop": stop}
        made = client.completions.create(model="tiny", temperature=0, **asked)
        assert made.choices[0].text == whole[: whole.index(end)]
        assert made.choices[0].finish_reason == "stop"


def test_what_is_told(url: str, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "pliant"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert HTTP.get(f"{url}/health").json() == {"status": "ok"}
    before = metric(url, "pliant_requests_finished_total")
    client.completions.create(model="tiny", prompt="a", max_tokens=3, temperature=0)
    assert metric(url, "pliant_requests_finished_total") == before + 1
    assert metric(url, "pliant_first_token_seconds_count") > 0
    assert metric(url, 'pliant_memory_bytes{what="weights"}') > 0
    assert metric(url, 'pliant_requests{state="running"}') == 0


REFUSED = [
    ({"prompt": 7}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"n": 17}, "n"),
    ({"stop": [1]}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": "no"}}, "stream_options"),
    ({"stream_options": {"colour": True}}, "stream_options"),
    ({"logprobs": 3}, "logprobs"),
    ({"presence_penalty": 1.5}, "presence_penalty"),
    ({"colour": "red"}, "colour"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refused_fields(url: str, fields: dict[str, Any], param: str) -> None:
    content = json.dumps({"prompt": "a", "max_tokens": 2, **fields})
    answer = HTTP.post(f"{url}/v1/completions", content=content)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_refused_requests(url: str, client: openai.OpenAI) -> None:
    for body in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000):
        answer = HTTP.post(f"{url}/v1/completions", content=body)
        assert answer.status_code == 400, body[:10]
    ask = {"role": "user", "content": "a"}
    image = {"type": "image_url", "text": "a"}
    for messages in (
        *(None, [], [1], [{"role": "user"}], [{"content": "a"}]),
        [{**ask, "content": "\ud800"}],
        [{**ask, "content": [image]}],
        [{**ask, "tool_calls": [{"id": "1"}]}],
    ):
        content = json.dumps({"messages": messages})
        answer = HTTP.post(f"{url}/v1/chat/completions", content=content)
        assert answer.status_code == 400, messages
        assert answer.json()["error"]["param"] == "messages"
    empty = {"messages": [{**ask, "tool_calls": None}], "max_tokens": 1}
    assert HTTP.post(f"{url}/v1/chat/completions", json=empty).status_code == 200
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.BadRequestError, match="512") as found:
        client.completions.create(model="tiny", prompt="a", max_tokens=10**9)
    assert found.value.code == "context_length_exceeded"
    assert HTTP.get(f"{url}/v1/completions").status_code == 405
    assert HTTP.get(f"{url}/nowhere").status_code == 404


def test_many_clients_under_a_limit(lm: pliant.LanguageModel) -> None:
    """Nothing is lost or mixed up, and nothing is above the limit."""
    prompts = [f"{PROMPTS[k % 4]}{k}" for k in range(24)]
    want = [lm.generate(prompt, 4 + k % 7) for k, prompt in enumerate(prompts)]
    free = Batch(lm)
    one = free._room(1, 512, 0)
    row = 512 * token_bytes(lm.shape)
    limit = free.weights.weight_bytes + one.caches + one.least + 4 * row
    with served(lm, memory_limit=limit) as (url, server, _):

        async def all_of_them() -> list[str]:
            client = openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0
            )

            async def ask(k: int, prompt: str) -> str:
                parts = await client.completions.create(
                    model="tiny",
                    prompt=prompt,
                    max_tokens=4 + k % 7,
                    temperature=0,
                    stream=True,
                )
                return "".join([part.choices[0].text async for part in parts])

            asked = (ask(*item) for item in enumerate(prompts))
            return await asyncio.gather(*asked)

        assert asyncio.run(all_of_them()) == want
        counts = server.batch.counts
        assert (counts.finished, counts.failed) == (24, 0)
        assert 0 < counts.peak_bytes <= limit
        assert metric(url, "pliant_memory_limit_bytes") == limit


def test_a_limit_that_is_too_small(lm: pliant.LanguageModel) -> None:
    free = Batch(lm)
    small = free._room(1, 40, 0)
    limit = free.weights.weight_bytes + small.caches + small.least
    with served(lm, memory_limit=limit) as (url, server, _):
        body = {"prompt": "a", "max_tokens": 400, "temperature": 0}
        answer = HTTP.post(f"{url}/v1/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "memory_limit_exceeded")
        assert error["limit"] == limit < error["least"]
        assert str(error["least"]) in error["message"]
        body["max_tokens"] = 40
        answer = HTTP.post(f"{url}/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == lm.generate("a", 40)
        assert server.batch.counts.peak_bytes <= limit


ENDLESS = {"prompt": "the", "max_tokens": 500, "temperature": 1, "seed": 1}


def test_clients_that_vanish(
    lm: pliant.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stream, without, and while they wait: their places are free again."""
    monkeypatch.setattr(lm.tokens, "ends", frozenset())
    slow(lm, monkeypatch)
    with served(lm, most_rows=1) as (url, server, _):
        batch = server.batch
        stream = {**ENDLESS, "stream": True}
        with HTTP.stream("POST", f"{url}/v1/completions", json=stream) as answer:
            lines = answer.iter_lines()  # without it, the stream is closed
            next(lines)
            with posted(url, ENDLESS):
                until(lambda: batch.waiting)
            until(lambda: batch.counts.cancelled == 1)
            assert len(batch.rows) == 1
        until(lambda: batch.counts.cancelled == 2)
        with posted(url, ENDLESS):
            until(lambda: batch.rows)
        until(lambda: batch.counts.cancelled == 3)
        body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
        assert HTTP.post(f"{url}/v1/completions", json=body).status_code == 200
        until(lambda: not batch.rows and not batch.waiting)
        assert not batch.caches.lengths.any()


@contextlib.contextmanager
def posted(url: str, body: dict[str, Any]) -> Iterator[None]:
    """A client that goes without having read the answer."""
    place = httpx.URL(url)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.host}\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((place.host, place.port)) as connection:
        connection.sendall(head.encode() + content)
        yield


def slow(lm: pliant.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every call take a while, so that a long text has not ended."""
    run = lm.run

    def wait(*given: Any) -> Any:
        time.sleep(0.1)
        return run(*given)

    monkeypatch.setattr(lm, "run", wait)


def test_too_many_wait(
    lm: pliant.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm.tokens, "ends", frozenset())
    slow(lm, monkeypatch)
    with served(lm, most_rows=1, most_waiting=0) as (url, *_):
        answer = HTTP.post(f"{url}/v1/completions", json=ENDLESS)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "busy"


@pytest.mark.parametrize("grace", [0, 60])
def test_a_graceful_stop(
    lm: pliant.LanguageModel, monkeypatch: pytest.MonkeyPatch, grace: int
) -> None:
    """What runs comes to its end, if the grace is long enough."""
    monkeypatch.setattr(lm.tokens, "ends", frozenset())
    slow(lm, monkeypatch)
    body = {**ENDLESS, "max_tokens": 12, "stream": True}
    with served(lm, grace) as (url, server, web):
        with HTTP.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            web.should_exit = True
            try:
                found = [line for line in lines if line]
            except httpx.RemoteProtocolError:
                found = []
        if grace:
            assert found[-1] == "data: [DONE]"
            last = json.loads(found[-2].removeprefix("data: "))
            assert last["choices"][0]["finish_reason"] == "length"
        else:
            assert "data: [DONE]" not in found
        until(lambda: not server.worker._thread.is_alive())
        with pytest.raises(httpx.ConnectError):
            HTTP.get(f"{url}/health")


def test_a_bug_reaches_every_client(
    lm: pliant.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(lm) as (url, server, _):
        monkeypatch.setattr(server.batch, "step", lambda: 1 // 0)
        body = {"prompt": "a", "max_tokens": 2}
        answer = HTTP.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 500
        assert "ZeroDivisionError" in answer.json()["error"]["message"]
        assert HTTP.post(f"{url}/v1/completions", json=body).status_code == 503
        assert HTTP.get(f"{url}/health").status_code == 503
