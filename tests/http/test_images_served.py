"""Images from official clients to a real group of two ranks whose model sees, against the engines' own interface."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from allspark_client import AllSparkError, AsModelConfig, ClientEngine
from allspark_launch.group.background import background_group
from allspark_server import Engine
from fuzz.bodies import peak_mib
from support.hostile_images import BOMB, chunk, crafted, fuzzed, jpeg_of, png, zeros
from support.http_helpers import http_server_for, refusal
from support.images import noise
from support.pictures import base64_of, data_url, encoded, pixels
from support.processes import ranks_of
from support.seed import SEED
from support.vision import PAD, checkpoint

MODEL = "qwen3-vl"
COUNT = 16
GREEDY = {"model": MODEL, "temperature": 0}
CLAUDE = {"model": MODEL, "extra_body": {"temperature": 0}}     # newer clients have no such argument
ALWAYS = {"do_sample": False, "max_new_tokens": COUNT}


@pytest.fixture(scope="module")
def served():
    """The clients of one group: OpenAI's, Anthropic's, plain HTTP, the project's own, and an engine without a group."""
    model = str(checkpoint(MODEL))
    with contextlib.ExitStack() as stack:
        words = ["--model", model, "--model-name", MODEL, "--ranks", "2"]
        running = stack.enter_context(background_group(words, timeout=60.0))
        group = running.addresses[0]
        url = f"http://{stack.enter_context(http_server_for(group, insecure=True, strict_fields=True))}"
        local = stack.enter_context(Engine())
        local.install_model(AsModelConfig(MODEL, model))
        local.start_model(MODEL)
        yield SimpleNamespace(
            open_ai=stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)),
            claude=stack.enter_context(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)),
            http=stack.enter_context(httpx.Client(base_url=url, timeout=60)),
            client=stack.enter_context(ClientEngine(group)), local=local, supervisor=running.supervisor_pid)


def pictures() -> list[bytes]:
    """Some of each format, of sizes that are resized and of ones that are not."""
    sizes = [(24, 36), (37, 101), (150, 133), (240, 251)]
    forms = ["PNG", "JPEG", "WebP", "GIF"]
    return [encoded(pixels(*size), form) for size, form in zip(sizes, forms)]


def mixed() -> list[str | bytes]:
    """A prompt with images before, between and after its texts."""
    first, second, third, fourth = pictures()
    return [first, "one two ", second, third, " the dog sleeps ", fourth, "naïve café"]


# --- a prompt in the form of each interface ----------------------------------------------------------------------


def user(parts: list[dict]) -> list[dict]:
    return [{"role": "user", "content": parts}]


def for_engines(prompt) -> dict:
    return {"messages": user([{"type": "image", "image": part} if isinstance(part, bytes) else
                              {"type": "text", "text": part} for part in prompt])}


def for_chat(prompt) -> list[dict]:
    return user([{"type": "image_url", "image_url": {"url": data_url(part)}} if isinstance(part, bytes) else
                 {"type": "text", "text": part} for part in prompt])


def for_responses(prompt) -> list[dict]:
    return user([{"type": "input_image", "image_url": data_url(part)} if isinstance(part, bytes) else
                 {"type": "input_text", "text": part} for part in prompt])


def for_claude(prompt) -> list[dict]:
    return user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(part)}}
                 if isinstance(part, bytes) else {"type": "text", "text": part} for part in prompt])


def answer(engine, prompt, **config):
    """(ids, text, log probabilities) of an engine's greedy answer."""
    with engine.generate(MODEL, for_engines(prompt), {**ALWAYS, "logprobs": True, **config}) as results:
        elements = list(results)
    return ([i for e in elements for i in e.ids_from_generate], "".join(e.text for e in elements),
            [p for e in elements for p in e.token_logprobs_list])


# --- the same answers --------------------------------------------------------------------------------------------


def test_the_same_tokens_everywhere(served):
    """Of several images, between texts: by the engines, in chats as they come and whole, in responses and messages."""
    for prompt in (mixed(), ["jumps over", pictures()[1]]):
        ids, text, logprobs = answer(served.client, prompt)
        alone = answer(served.local, prompt)    # on one rank, which adds in another order
        assert alone[:2] == (ids, text) and np.allclose(alone[2], logprobs, atol=1e-3)
        asked = {**GREEDY, "messages": for_chat(prompt), "max_tokens": COUNT, "logprobs": True}
        whole = served.open_ai.chat.completions.create(**asked, extra_body={"return_token_ids": True})
        choice, = whole.choices
        assert (choice.token_ids, choice.message.content) == (ids, text)
        assert [entry.logprob for entry in choice.logprobs.content] == logprobs
        chunks = list(served.open_ai.chat.completions.create(**asked, stream=True,
                                                             extra_body={"return_token_ids": True}))
        assert [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", [])] == ids
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        response = served.open_ai.responses.create(**GREEDY, input=for_responses(prompt), max_output_tokens=COUNT)
        assert response.output_text == text
        asked = {**CLAUDE, "messages": for_claude(prompt), "max_tokens": COUNT}
        assert "".join(block.text for block in served.claude.messages.create(**asked).content) == text
        with served.claude.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == text


def test_the_model_looks(served):
    """Another image, or the same ones in another order, is another prompt of the same ids."""
    first, second = (encoded(pixels(60, 48)) for _ in range(2))
    prompts = [[first, "or", second], [second, "or", first], [first, "or", first]]
    assert len({tuple(served.client.tokenize(MODEL, for_engines(prompt))) for prompt in prompts}) == 1
    rows = [answer(served.client, prompt)[2] for prompt in prompts]
    assert rows[0] != rows[1] and rows[0] != rows[2] and rows[1] != rows[2]
    assert rows[0] == answer(served.client, prompts[0])[2]      # which is cached now


def test_samples_with_log_probabilities(served):
    prompt = mixed()
    config = {"n": 2, "seed": 7, "temperature": 0.9, "logprobs": True, "top_logprobs": 3}
    with served.client.generate(MODEL, for_engines(prompt), {**config, "max_new_tokens": COUNT}) as results:
        expected: list[list[tuple[int, float]]] = [[], []]
        for elements in results:
            expected[elements.sample_index] += zip(elements.ids_from_generate, elements.token_logprobs_list)
    given = served.open_ai.chat.completions.create(model=MODEL, messages=for_chat(prompt), max_tokens=COUNT, **config,
                                                   extra_body={"return_token_ids": True})
    for choice, own in zip(given.choices, expected, strict=True):
        entries = choice.logprobs.content
        assert list(zip(choice.token_ids, [entry.logprob for entry in entries], strict=True)) == own
        assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert expected[0] != expected[1]


def test_a_schema(served):
    given = served.open_ai.chat.completions.create(
        **GREEDY, messages=for_chat(mixed()), max_tokens=50, extra_body={"stop_token_ids": [2]},
        response_format={"type": "json_schema", "json_schema": {"name": "look", "schema": {"enum": ["fox", "dog"]}}})
    assert json.loads(given.choices[0].message.content) in ("fox", "dog")


# --- counts ------------------------------------------------------------------------------------------------------


def test_tokens_are_counted(served):
    """Those of images are, in every interface; what is cached of them counts as cached."""
    prompt = mixed()
    ids = served.client.tokenize(MODEL, for_engines(prompt))
    bare = served.client.tokenize(MODEL, for_engines([part for part in prompt if isinstance(part, str)]))
    images = ids.count(PAD)
    # 2 marks about each image; a unit has 12 x 12 pixels, and at most 40,000 of them are seen
    assert len(ids) == len(bare) + images + 2 * 4 and images > 2 * 3 + 3 * 8 + 11 * 12 + 100
    assert served.http.post("/tokenize", json={"model": MODEL, "messages": for_chat(prompt)}).json()["tokens"] == ids
    usage = [served.open_ai.chat.completions.create(**GREEDY, messages=for_chat(prompt), max_tokens=1).usage
             for _ in range(2)]
    assert [each.prompt_tokens for each in usage] == [len(ids)] * 2
    cached = [each.prompt_tokens_details.cached_tokens for each in usage]
    assert cached[0] < 32 and len(ids) - 32 <= cached[1] < len(ids)
    response = served.open_ai.responses.create(**GREEDY, input=for_responses(prompt), max_output_tokens=1)
    assert response.usage.input_tokens == len(ids) and response.usage.input_tokens_details.cached_tokens == cached[1]
    message = served.claude.messages.create(**CLAUDE, messages=for_claude(prompt), max_tokens=1).usage
    assert (message.cache_read_input_tokens, message.input_tokens) == (cached[1], len(ids) - cached[1])
    counted = served.claude.messages.count_tokens(model=MODEL, messages=for_claude(prompt))
    assert counted.input_tokens == len(ids)
    # what follows other images is not cached
    other = [encoded(255 - pixels(24, 36)), *prompt[1:]]
    other_usage = served.open_ai.chat.completions.create(**GREEDY, messages=for_chat(other), max_tokens=1).usage
    assert other_usage.prompt_tokens_details.cached_tokens < 32


def test_sizes(served):
    """Bounds of a request are those of its images."""
    picture = encoded(pixels(190, 190))

    def count(**bounds) -> int:
        part = {"type": "image_url", "image_url": {"url": data_url(picture), **bounds}}
        answered = served.http.post("/tokenize", json={"model": MODEL, "messages": user([part])})
        return answered.json()["tokens"].count(PAD)

    assert count() == 16 * 16       # of 12 x 12 pixels
    assert count(max_pixels=144) == 1 and count(max_pixels=61 * 61) == 25 and count(min_pixels=195 * 195) == 17 * 17


def test_models(served):
    entry, = served.http.get("/v1/models").json()["data"]
    assert entry["id"] == MODEL and entry["capabilities"] == {"vision": True}
    assert served.client.get_model_info(MODEL).sees_images


# --- hostile files -----------------------------------------------------------------------------------------------


def test_hostile_files(served):
    """Each is refused with the image's field, whatever interface it comes by; others are answered."""
    good, small = pictures()[0], noise(np.random.default_rng(), 40, 30)
    expected = answer(served.client, [good, "the dog"])
    files = [(encoded(pixels(40, 30))[:900], "is a broken PNG file"),
             (png(2**31 - 1, 2**31 - 1, chunk(b"IDAT", zeros(9))), BOMB),
             (png(20_000, 20_000, chunk(b"IDAT", zeros(1 << 22))), BOMB), (jpeg_of(small, 65_500, 65_500), BOMB)]
    for number, (content, why) in enumerate(files):
        prompt = [good, "and", content]
        error = refusal(served.http, "/v1/chat/completions",
                        {**GREEDY, "messages": for_chat(prompt), "stream": number % 2 == 1})
        place = "messages[0].content[2].image_url"
        assert error["message"].startswith(f"Invalid value for '{place}': the image {why}") and error["param"] == place
        with pytest.raises(openai.BadRequestError, match=r"'input\[0\].content\[2\].image_url': the image "):
            served.open_ai.responses.create(**GREEDY, input=for_responses(prompt))
        with pytest.raises(anthropic.BadRequestError, match=r"'messages\[0\].content\[2\].source.data': the image "):
            served.claude.messages.create(**CLAUDE, messages=for_claude(prompt), max_tokens=2)
    bitmap = [good, encoded(pixels(), "BMP")]
    error = refusal(served.http, "/v1/chat/completions", {**GREEDY, "messages": for_chat(bitmap)})
    assert error["param"] == "messages[0].content[1].image_url" and "none of PNG, JPEG, GIF, WebP" in error["message"]
    error = refusal(served.http, "/tokenize", {"model": MODEL, "messages": for_chat([good, files[0][0]])})
    assert error["param"] == "messages[0].content[1].image_url"
    with pytest.raises(AllSparkError, match="image 2 of the request is a broken PNG file"):     # in Python, its number
        answer(served.client, [good, "and", files[0][0]])
    assert answer(served.client, [good, "the dog"]) == expected


def spent(processes: list[psutil.Process]) -> float:
    """CPU seconds of processes and all their children, also those that have ended."""
    times = [each.cpu_times() for process in processes for each in (process, *process.children(recursive=True))]
    return sum(sum(each[:4]) for each in times)


def workers_at(port: int) -> list[psutil.Process]:
    """The processes of the HTTP server there. Other tests of this process may have servers of their own."""
    return [each for each in psutil.Process().children(recursive=True) if "allspark_server.http" in each.cmdline()
            and any(found.status == psutil.CONN_LISTEN and found.laddr.port == port
                    for found in each.net_connections("tcp"))]


@pytest.mark.slow
@pytest.mark.parametrize("rng", [np.random.default_rng(SEED)], ids=[f"seed{SEED}"])
def test_many_hostile_files(served, rng):
    """None is an error of the server's, or costs more than an image may; the server's memory does not grow."""
    good = pictures()[0]
    expected = answer(served.client, [good, "the dog"])
    worker, = workers_at(served.http.base_url.port)
    servers = [*ranks_of(served.supervisor), worker]
    before = [peak_mib(server.pid) for server in servers]
    files = {name: content for name, (content, _) in crafted(rng).items()}
    files |= {f"fuzzed {number}": content for number, content in enumerate(fuzzed(rng, 150))}
    statuses = []
    for name, content in files.items():
        body = {**GREEDY, "messages": for_chat(["see", content]), "max_tokens": 1}
        used = spent(servers)
        answered = served.http.post("/v1/chat/completions", json=body, timeout=180)    # a busy machine takes longer
        assert spent(servers) - used <= 2 + 1.5, name       # 2 s of a process that decodes, and the rest
        statuses.append(answered.status_code)
        if answered.status_code == 400:
            error = answered.json()["error"]
            assert error["param"] or error["message"].startswith("image 1 of the request "), (name, error)
        else:
            assert answered.status_code == 200 or (answered.status_code == 413 and len(content) > 11 << 20), name
    assert statuses.count(200) > 20 and statuses.count(400) > 50
    # a body has 16 MiB; it is in the worker and in rank 0 a few times
    assert max(peak_mib(server.pid) - earlier for server, earlier in zip(servers, before)) < 200
    assert answer(served.client, [good, "the dog"]) == expected
