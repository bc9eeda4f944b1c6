"""vLLM's own server as `llava-consensus serve` starts it, asked over HTTP and by OpenAI's client."""

import json
from collections.abc import Iterator
from typing import Any

import asking
import pytest
import requests
import small
from asking import reference
from strangers import Server, fuzz, png, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(made: Any) -> Iterator[Server]:
    with serving(made("llava")[0], "--method visionzip --tokens 5 --largest 9") as server:
        yield server


def test_a_server_answers_from_the_tokens_it_was_told_and_refuses_bad_requests(server: Server, made: Any) -> None:
    openai = pytest.importorskip("openai")
    model, asked = made("llava")[1], asking.Request("<image> w7 w8 w9", [small.picture(1)])
    tokenizer = model[1].tokenizer
    expected = {k: tokenizer.decode(reference(model, [asked], "visionzip", k)[0].ids) for k in (5, 9)}
    words = len(tokenizer("w7 w8 w9").input_ids)

    status, answer = server.ask(png(1))
    assert status == 200 and answer["choices"][0]["message"]["content"].strip() == expected[5]
    assert answer["usage"]["prompt_tokens"] == words + 5

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    body = server.body(png(1))
    own = {"ignore_eos": body.pop("ignore_eos"), "mm_processor_kwargs": {"visual_tokens": 9}}
    said = client.chat.completions.create(**body, extra_body=own)
    assert said.choices[0].message.content.strip() == expected[9] and said.usage.prompt_tokens == words + 9

    too_many = [(tokens, "more than this server allows, 9") for tokens in (10, 2**41, 2**63)]
    for tokens, reason in [(0, "at least 1"), ("many", "whole number"), *too_many]:
        status, answer = server.ask(png(1), mm_processor_kwargs={"visual_tokens": tokens})
        text = answer["error"]["message"]
        assert status == 400 and f"visual_tokens={tokens!r}" in text and reason in text and "\n" not in text, answer
    for more, reason in [
        ({"mm_processor_kwargs": {"crop_size": {"height": 112, "width": 112}}}, "'crop_size': a request may only say"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "grammar"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"media_io_kwargs": {"video": {"num_frames": 10**6}}}, "media_io_kwargs are disabled"),
    ]:
        status, answer = server.ask(png(1), **more)
        assert status == 400 and reason in answer["error"]["message"], answer
    for size in ((1, 12_000), (4000, 40)):
        status, answer = server.ask(png(1, size))
        assert status == 400 and f"{size[0]} x {size[1]} pixels" in answer["error"]["message"], answer
    assert server.ask(png(1, (600, 12)))[0] == 200
    for tokens, expected_tokens in ((9.0, 9), (None, 5)):
        status, answer = server.ask(png(1), mm_processor_kwargs={"visual_tokens": tokens})
        assert status == 200 and answer["usage"]["prompt_tokens"] == words + expected_tokens, answer
    body = {**server.body(png(1)), "messages": [{"role": "user", "content": "w7"}]}
    assert server.post(body, "messages")[0] == 200
    status, answer = server.post({**body, "mm_processor_kwargs": {"visual_tokens": 9}}, "messages")
    assert status == 400 and "/v1/messages does not take visual_tokens" in answer["error"]["message"], answer
    status, answer = server.ask(b"no image")
    assert status == 400 and "image" in answer["error"]["message"] and "\n" not in answer["error"]["message"]

    assert server.ask(png(1))[1]["choices"][0]["message"]["content"].strip() == expected[5]


def test_a_server_says_which_reduction_it_runs(server: Server) -> None:
    answer = requests.get(f"{server.url}/v1/models", timeout=60)
    (card,), told = answer.json()["data"], answer.headers["visual-reduction"]
    identity = card["visual_reduction"]
    assert json.loads(told) == identity and identity.pop("plugin")
    assert identity == dict(method="visionzip", options={}, tokens=5, largest=9, positions="renumber")
    body = server.body(png(1), stream=True)
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.headers["visual-reduction"] == told and answer.content.endswith(b"[DONE]\n\n")


def test_metrics_count_tokens_and_the_time_of_reductions(server: Server) -> None:
    def counted() -> dict[str, float]:
        lines = requests.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        named = [line.rpartition(" ") for line in lines if line.startswith("visual_reduction")]
        return {name: float(value) for name, _, value in named}

    before = counted()
    server.ask(png(77))
    after = counted()
    grown = {name.removeprefix("visual_reduction_"): after[name] - before.get(name, 0) for name in after}
    assert grown['tokens_before_total{modality="image"}'] == 16 and grown['tokens_after_total{modality="image"}'] == 5
    assert 0 < grown["seconds_total"] < 60 and after["visual_reduction_kept_pictures"] == 0


def test_what_strangers_send_harms_their_request_alone(server: Server) -> None:
    statuses = fuzz(server, 40, seed=1)
    assert statuses[200] and statuses[400]
