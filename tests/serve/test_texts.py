"""OpenAI's protocol: texts are those of the generator, whole and in pieces, alone and together; what is not supported is refused by name."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.servers import Running, running

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'tcomp[generate]'")
pytest.importorskip("jinja2", reason="pip install 'tcomp[generate]'")

from tcomp.errors import TcompError
from tcomp.generation import Generator, Scheduler
from tcomp.generation.scheduler import Progress
from tcomp.serve.metrics import Metrics
from tcomp.serve.options import ModelOptions
from tcomp.serve.text import parameters
from tcomp.serve.text.queue import TextQueue
from tests.language_models.test_generation import CONFIG, PROMPT, byte_generator, greedy, small_model

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
TEXT = " ".join(f"w{t}" for t in PROMPT)
ANSWER = "".join(f"w{t} " for t in greedy(PROMPT, 12)).strip()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("texts") / "small" / "1"
    folder.mkdir(parents=True)
    words = {f"w{n}": n for n in range(254)} | {"user": 254, "assistant": 255}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 999}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "w1"}))
    small_model().save(folder / "model.tcomp")
    with running(folder.parents[1], grpc_port=None) as found:
        yield found


def post(server: Running, path: str, **body: Any) -> tuple[int, Any]:
    return server.ask("POST", f"/v1/{path}", {"model": "small", **body})[:2]


def events(server: Running, path: str, **body: Any) -> list[Any]:
    content = server.ask("POST", f"/v1/{path}", {"model": "small", "stream": True, **body})[1].decode()
    lines = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_completions(texts: Running) -> None:
    status, answer = post(texts, "completions", prompt=TEXT, max_tokens=12, temperature=0, logprobs=2)
    (choice,) = answer["choices"]
    assert (
        status == 200 and answer["object"] == "text_completion" and choice["text"].strip() == ANSWER and choice["finish_reason"] == "length"
    )
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
    assert choice["logprobs"]["tokens"] == ANSWER.split() and [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 12
    several = post(texts, "completions", prompt=[PROMPT, [9, 9]], max_tokens=4, temperature=0, n=2)[1]["choices"]
    assert [c["index"] for c in several] == [0, 1, 2, 3] and several[0]["text"] == several[1]["text"] != several[2]["text"]
    stopped = post(texts, "completions", prompt=TEXT, max_tokens=12, temperature=0, stop=[ANSWER.split()[3]])[1]["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["text"].strip() == " ".join(ANSWER.split()[:3])


def test_pieces(texts: Running) -> None:
    found = events(texts, "completions", prompt=TEXT, max_tokens=12, temperature=0, stream_options={"include_usage": True})
    assert "".join(e["choices"][0]["text"] for e in found[:-1]).strip() == ANSWER
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 12 and len({e["id"] for e in found}) == 1
    assert [e["choices"][0]["finish_reason"] for e in found[:-1]] == [None] * (len(found) - 2) + ["length"]


def test_chats(texts: Running) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "w7 w8"}]}]
    wanted = greedy([254, 7, 8, 255], 6)
    body = {"messages": messages, "max_completion_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    status, answer = post(texts, "chat/completions", **body)
    (choice,) = answer["choices"]
    told = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert status == 200 and choice["message"]["role"] == "assistant" and answer["object"] == "chat.completion"
    assert (
        choice["message"]["content"].split()
        == told
        == [["w", ""][t > 253] + str(t) if t < 254 else ["user", "assistant"][t - 254] for t in wanted]
    )
    found = events(texts, "chat/completions", **body)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""} and found[0]["object"] == "chat.completion.chunk"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in found) == choice["message"]["content"]


def test_texts_that_are_asked_for_at_the_same_time_are_the_same(texts: Running) -> None:
    prompts = [[n, 5, 9] for n in range(6)]
    together = [c["text"] for c in post(texts, "completions", prompt=prompts, max_tokens=10, temperature=0)[1]["choices"]]
    assert [text.split() for text in together] == [[f"w{t}" for t in greedy(prompt, 10)] for prompt in prompts]


def test_texts_keep_to_a_grammar() -> None:
    pytest.importorskip("llguidance", reason="pip install 'tcomp[generate]'")
    generator = byte_generator()
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    body = {"model": "m", "prompt": "a", "max_tokens": 60, "temperature": 1.5, "seed": 0, "n": 3}
    for how, chosen in ((form, ("x", "yy")), ({"type": "json_object"}, None)):
        (*requests,) = parameters.completion({**body, "response_format": how}, generator).requests
        scheduler, found = Scheduler(generator.model, 2), dict.fromkeys(requests, "")
        for request in requests:
            scheduler.add(request)
        while scheduler.running or scheduler.waiting:
            for progress in scheduler.step():
                assert progress.piece is not None, progress.error
                found[progress.request] += progress.piece.text
        for request, text in found.items():
            assert text.lstrip()[0] == "{" and (chosen is None or (json.loads(text)["a"] in chosen and request.finish == "stop"))
    for wrong in ({"type": "json_schema"}, {"type": "xml"}, {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}):
        with pytest.raises(TcompError, match="response_format|grammar"):
            parameters.completion({**body, "response_format": wrong}, generator)


def test_sampling_with_a_seed_is_repeated(texts: Running) -> None:
    one, other, third = (
        post(texts, "completions", prompt=TEXT, max_tokens=8, temperature=2, seed=s)[1]["choices"][0]["text"] for s in (1, 1, 2)
    )
    assert one == other != third


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("completions", {"prompt": TEXT, "model": "other"}, None, 404),
        ("completions", {"prompt": TEXT, "temperature": -1}, "temperature", 400),
        ("completions", {"prompt": TEXT, "echo": True}, "echo", 400),
        ("completions", {"prompt": TEXT, "no_such_thing": 1}, "no_such_thing", 400),
        ("completions", {"prompt": {"a": 1}}, "prompt", 400),
        ("completions", {"prompt": [1] * 64}, None, 400),
        ("completions", {"prompt": TEXT, "max_tokens": "7"}, "max_tokens", 400),
        ("completions", {"prompt": TEXT, "logit_bias": {"x": 1}}, "logit_bias", 400),
        ("completions", {"prompt": TEXT, "logit_bias": {"999": 1}}, None, 400),
        ("chat/completions", {"messages": []}, "messages", 400),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[].content", 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "w1"}], "tools": [{"type": "function"}]}, "tools", 400),
        ("chat/completions", {"messages": [{"role": "user", "content": "w1"}], "top_logprobs": 2}, "top_logprobs", 400),
    ],
)
def test_refusals_have_openais_shape(texts: Running, path: str, body: dict[str, Any], param: str | None, status: int) -> None:
    found, answer = post(texts, path, **body)
    assert found == status and answer["error"]["message"] and answer["error"]["param"] == param
    assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_models(texts: Running) -> None:
    (model,) = texts.ask("GET", "/v1/models")[1]["data"]
    assert model["id"] == "small" and model["object"] == "model" and abs(model["created"] - time.time()) < 600
    assert texts.ask("GET", "/v1/models/small")[1] == model and texts.ask("GET", "/v1/models/other")[0] == 404
    assert texts.ask("GET", "/v2/models/small")[1]["name"] == "small"


def test_a_client_that_goes_stops_its_text(texts: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, gone, step = list[Scheduler](), threading.Event(), Scheduler.step

    def slow(scheduler: Scheduler) -> list[Progress]:
        steps.append(scheduler)
        if len(steps) == 4:
            gone.wait(20)
        return step(scheduler)

    def count() -> int:
        return texts.ask("GET", "/metrics")[1].decode().count('protocol="openai",status="499"')

    monkeypatch.setattr(Scheduler, "step", slow)
    assert count() == 0
    connection = http.client.HTTPConnection("127.0.0.1", texts.port, timeout=20)
    body = {"model": "small", "prompt": TEXT, "max_tokens": 60, "stream": True, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    answer.read(20)
    answer.close()
    connection.close()
    end = time.monotonic() + 20
    while not count() and time.monotonic() < end:
        time.sleep(0.005)
    gone.set()
    while steps[0].running and time.monotonic() < end:
        time.sleep(0.005)
    assert count() and len(steps) < 8


def test_texts_that_end_before_somebody_asks_are_whole() -> None:
    async def run() -> list[Any]:
        queue = TextQueue("m-1", byte_generator(), ModelOptions(), Metrics().of("m", "1", 1))
        with queue.join([queue.generator.request("a", 4), queue.generator.request("b", 2)]) as asked:
            while any(request.finish is None for request in asked.requests):
                await asyncio.sleep(0)
            found = [progress async for progress in asked.pieces()]
        await queue.close()
        return found

    assert sorted(progress.number for progress in asyncio.run(run())) == [0, 0, 0, 0, 1, 1]


def test_openais_client(texts: Running) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{texts.port}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["small"]
    text = client.completions.create(model="small", prompt=TEXT, max_tokens=12, temperature=0).choices[0].text
    assert text.strip() == ANSWER
    messages: Any = [{"role": "user", "content": "w7 w8"}]
    whole = client.chat.completions.create(
        model="small", messages=messages, temperature=0, max_completion_tokens=5, extra_body={"top_k": 5}
    )
    pieces = client.chat.completions.create(model="small", messages=messages, temperature=0, max_completion_tokens=5, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="no_such_thing"):
        client.completions.create(model="small", prompt=TEXT, extra_body={"no_such_thing": 1})


def test_chats_need_a_template_that_behaves() -> None:
    from tcomp.errors import InputError
    from tcomp.generation.chat_template import ChatTemplate

    assert (
        ChatTemplate("{{ bos_token }}{{ messages[0].content | tojson }}", {"bos_token": "<s>"}).text([{"role": "user", "content": "é<"}])
        == '<s>"é<"'
    )
    for bad in (
        "{{ ''.__class__.__mro__ }}",
        "{{ 'a' * 1000000000 }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(InputError, match="refuses"):
            ChatTemplate(bad, {}).text([{"role": "user", "content": "x"}])
    with pytest.raises(InputError, match="cannot be read"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(InputError, match="no template"):
        Generator(small_model()).chat_prompt([{"role": "user", "content": "x"}])


def test_templates_that_take_for_ever_are_ended() -> None:
    from tcomp.errors import InputError
    from tcomp.generation.chat_template import ChatTemplate

    message = [{"role": "user", "content": "x"}]
    loop = "{% if messages[0].content != 'quick' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ bos }}"
    template = ChatTemplate(loop, {"bos": "b"}, seconds=1)
    start = time.monotonic()
    with pytest.raises(InputError, match="more than 1 s"):
        template.text(message)
    assert time.monotonic() - start < 10
    assert template.text([{"role": "user", "content": "quick"}]) == "b"  # by a process anew
    growing = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = GROW %}{% endfor %}{{ n.x }}"
    for grow in ("n.x + n.x", "[n.x, n.x]", "n.x ~ n.x", "n.x | string | replace('1', '11')"):
        with pytest.raises(InputError, match="refuses these messages"):
            ChatTemplate(growing.replace("GROW", grow), {}, seconds=3).text(message)
    with pytest.raises(InputError, match="not JSON"):
        template.text([{"role": "user", "content": object()}])


def test_a_template_that_takes_for_ever_to_read() -> None:
    from tcomp.errors import InputError
    from tcomp.generation.chat_template import ChatTemplate

    with pytest.raises(InputError, match="cannot be read"):
        ChatTemplate("{{ 'a' | center(99999999999) }}{% if %}", {}, seconds=1)


def test_processes_of_templates_end_with_them() -> None:
    from tcomp.generation.chat_template import ChatTemplate

    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template._process is not None
    process = template._process._process
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(template.text, ([{"content": f"{n}"}] for n in range(50)))] == [f"{n}" for n in range(50)]
    del template
    assert process.wait(20) == 0
