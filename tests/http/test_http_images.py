"""Images in chats, responses and messages, as the official clients send them, up to what rank 0 gets."""

from __future__ import annotations

import base64
import json
import random

import httpx
import pytest

from allspark_client import AllSparkError, AsStatus
from support.fake_service import serving
from support.http_helpers import http_server_for, refusal, token_file, within
from support.pictures import base64_of, data_url, encoded, pixels
from support.script_engine import ScriptEngine

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

SEEN = {"model": "m"}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """An HTTP server, with a store, whose model "m" sees and repeats the last message: (address, engine)."""
    store = tmp_path_factory.mktemp("store") / "kept.db"
    with serving(core=ScriptEngine("hermes", sees_images=True)) as (engine, group), \
            http_server_for(group, insecure=True, allow_image_hosts="*", max_image_mib=1, store=str(store)) as address:
        yield address, engine


@pytest.fixture(scope="module")
def client(seeing):
    with httpx.Client(base_url=f"http://{seeing[0]}", timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def open_ai(seeing):
    with openai.OpenAI(base_url=f"http://{seeing[0]}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def claude(seeing):
    with anthropic.Anthropic(base_url=f"http://{seeing[0]}", api_key="none", max_retries=0) as found:
        yield found


def pictures(count: int = 1) -> list[bytes]:
    return [encoded(pixels(), random.choice(["PNG", "JPEG", "WebP", "GIF"])) for _ in range(count)]


def image_url(content: bytes, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(content), **more}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def chat_of(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


def contents(engine) -> list[bytes]:
    """The images of the last request."""
    return [image.content for image in engine.submitted[-1].images]


# --- chats -------------------------------------------------------------------------------------------------------


def test_chat(seeing, open_ai):
    """Several images, between texts, in the turns of all roles."""
    given = pictures(6)
    messages = [
        {"role": "system", "content": [text("be brief"), image_url(given[0])]},
        {"role": "user", "content": [image_url(given[1]), text("and"), image_url(given[2])]},
        {"role": "assistant", "content": "I look.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("zoomed"), image_url(given[3])]},
        {"role": "user", "content": [text("first "), image_url(given[4]), text(" then "), image_url(given[5])]}]
    answer = open_ai.chat.completions.create(model="m", messages=messages)
    assert answer.choices[0].message.content == "first <image> then <image>"
    assert contents(seeing[1]) == given
    chunks = open_ai.chat.completions.create(model="m", messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "first <image> then <image>"
    assert contents(seeing[1]) == given


@pytest.mark.parametrize("part, more, bounds", [
    ({}, {}, (0, 0)), ({"detail": "auto"}, {}, (0, 0)), ({"detail": "high"}, {}, (0, 0)),
    ({"detail": "low"}, {}, (0, 512 * 512)), ({"max_pixels": 90}, {}, (0, 90)),
    ({"detail": "low", "max_pixels": 10**6, "min_pixels": 5}, {}, (5, 512 * 512)),
    ({"min_pixel": 7, "max_pixel": 9}, {}, (7, 9)),                                             # DashInfer's
    ({}, {"mm_processor_kwargs": {"min_pixels": 3, "max_pixels": 4}}, (3, 4)),                  # vLLM's
    ({"max_pixels": 5, "min_pixels": 2}, {"mm_processor_kwargs": {"min_pixels": 3, "max_pixels": 4}}, (2, 4)),
])
def test_sizes(seeing, open_ai, part, more, bounds):
    picture, = pictures()
    open_ai.chat.completions.create(model="m", messages=chat_of(image_url(picture, **part)), extra_body=more)
    image, = seeing[1].submitted[-1].images
    assert (image.content, image.min_pixels, image.max_pixels) == (picture, *bounds)


def frames_url(frames, kind: str = "jpeg") -> str:
    """A data URL of a video's frames, as vLLM takes it."""
    return f"data:video/{kind};base64," + ",".join(map(base64_of, frames))


@pytest.mark.parametrize("url, more, wanted", [
    ({}, {}, (2.0, 0, 0)), ({"fps": 4}, {}, (4.0, 0, 0)), (None, {"mm_processor_kwargs": {"fps": 0.5}}, (0.5, 0, 0)),
    ({"fps": 3.0, "min_pixels": 5, "max_pixels": 9}, {"mm_processor_kwargs": {"fps": 1, "max_pixels": 8}}, (3.0, 5, 8)),
])
def test_videos(seeing, open_ai, url, more, wanted):
    frames = pictures(3)
    given = frames_url(frames) if url is None else {"url": frames_url(frames), **url}
    messages = chat_of(text("What happens?"), {"type": "video_url", "video_url": given}, image_url(frames[0]))
    open_ai.chat.completions.create(model="m", messages=messages, extra_body=more)
    video, image = seeing[1].submitted[-1].images
    assert video.frames == tuple(frames) and (video.fps, video.min_pixels, video.max_pixels) == wanted
    assert image.content == frames[0]


def test_dashinfers_example(seeing, open_ai):
    """The fields of the client that comes with DashInfer's server for models that see (dashinfer_vlm)."""
    given = pictures(3)
    chunks = open_ai.chat.completions.create(
        model=open_ai.models.list().data[0].id,
        messages=chat_of(text("Are these images different?"), *map(image_url, given)),
        max_completion_tokens=1024, top_p=0.5, temperature=0.1, frequency_penalty=1.05, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert contents(seeing[1]) == given


def test_other_spellings(seeing, client):
    """What other clients send: a bare text as image_url, base64 in lines, upper case, no type."""
    picture, = pictures()
    lines = base64.encodebytes(picture).decode()
    for url in (data_url(picture), f"data:image/png;base64,{lines}", f"DATA:Image/PNG;Base64,{base64_of(picture)}",
                f"data:;base64,{base64_of(picture)}", f"data:image/jpeg;name=x.png;base64,{base64_of(picture)}"):
        body = {"model": "m", "messages": chat_of({"type": "image_url", "image_url": url})}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert contents(seeing[1]) == [picture]


def test_tokens_are_counted(seeing, client, claude, open_ai):
    picture, = pictures()
    body = {"model": "m", "messages": chat_of(text("abc"), image_url(picture))}
    count = client.post("/tokenize", json=body).json()["count"]
    answer = open_ai.chat.completions.create(**body)
    assert answer.usage.prompt_tokens == count
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(picture)}
    message = chat_of(text("abc"), {"type": "image", "source": source})
    counted = claude.messages.count_tokens(model="m", messages=message).input_tokens
    assert counted == claude.messages.create(model="m", messages=message, max_tokens=99).usage.input_tokens
    assert contents(seeing[1]) == [picture]


@pytest.mark.slow
def test_langchain(seeing):
    langchain = pytest.importorskip("langchain_openai")
    picture, = pictures()
    model = langchain.ChatOpenAI(model="m", base_url=f"http://{seeing[0]}/v1", api_key="none", max_retries=0)
    for part in (image_url(picture), {"type": "image", "source_type": "base64", "mime_type": "image/png",
                                      "data": base64_of(picture)}):
        assert model.invoke([("human", [text("see "), part])]).content == "see <image>"
        assert contents(seeing[1]) == [picture]


@pytest.mark.slow
def test_litellm(seeing):
    litellm = pytest.importorskip("litellm")
    picture, = pictures()
    for kind, base in (("openai", "/v1"), ("anthropic", "")):
        answer = litellm.completion(f"{kind}/m", chat_of(text("see "), image_url(picture)), api_key="none",
                                    api_base=f"http://{seeing[0]}{base}", max_tokens=99)
        assert answer.choices[0].message.content == "see <image>"
        assert contents(seeing[1]) == [picture]


# --- messages and responses --------------------------------------------------------------------------------------


def test_messages(seeing, claude):
    given = pictures(3)

    def block(content: bytes, kind: str = "image/webp") -> dict:
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": base64_of(content)},
                "cache_control": {"type": "ephemeral"}}

    messages = [*chat_of(block(given[0]), text("look")),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "zoom", "input": {}}]},
                *chat_of({"type": "tool_result", "tool_use_id": "t1", "content": [text("here"), block(given[1])]},
                         text("now "), block(given[2]), text("?"))]
    answer = claude.messages.create(model="m", max_tokens=99, messages=messages)
    assert answer.content[0].text == "now <image>?"
    assert contents(seeing[1]) == given
    with claude.messages.stream(model="m", max_tokens=99, messages=messages) as stream:
        assert stream.get_final_text() == "now <image>?"


def test_responses(seeing, open_ai):
    """Also in results of tools, and in inputs that the store keeps."""
    given = pictures(4)

    def image(content: bytes, **more) -> dict:
        return {"type": "input_image", "image_url": data_url(content), **more}

    def words(words: str) -> dict:
        return {"type": "input_text", "text": words}

    asked = [{"role": "user", "content": [words("a "), image(given[0], detail="low"), words(" b")]},
             {"type": "function_call", "call_id": "c1", "name": "zoom", "arguments": "{}"},
             {"type": "function_call_output", "call_id": "c1", "output": [words("zoomed"), image(given[1])]},
             {"role": "user", "content": [words("see "), image(given[2])]}]
    first = open_ai.responses.create(model="m", input=asked)
    assert first.output_text == "see <image>"
    assert contents(seeing[1]) == given[:3]
    assert seeing[1].submitted[-1].images[0].max_pixels == 512 * 512
    again = open_ai.responses.create(model="m", previous_response_id=first.id,
                                     input=[{"role": "user", "content": [image(given[3]), words("!")]}])
    assert again.output_text == "<image>!"
    assert contents(seeing[1]) == given
    items = open_ai.responses.input_items.list(first.id).data
    assert any(part.type == "input_image" for item in items if item.type == "message" for part in item.content)
    late = open_ai.responses.create(model="m", input=asked, background=True)
    assert within(20, lambda: open_ai.responses.retrieve(late.id).status == "completed")
    assert open_ai.responses.retrieve(late.id).output_text == "see <image>"
    assert contents(seeing[1]) == given[:3]


def test_uploaded_files(tmp_path):
    """Images of the tenant's own files by their ids, in every API, and where a response continues."""
    def clients(address: str, key: str) -> tuple[openai.OpenAI, anthropic.Anthropic]:
        return (openai.OpenAI(base_url=f"http://{address}/v1", api_key=f"key-{key}", max_retries=0),
                anthropic.Anthropic(base_url=f"http://{address}", api_key=f"key-{key}", max_retries=0))

    given = [*pictures(2), encoded(pixels(900, 900))]   # the last one has several chunks
    with serving(core=ScriptEngine("hermes", sees_images=True)) as (core, group), \
            http_server_for(group, token_file=token_file(tmp_path), store=str(tmp_path / "kept.db"),
                            max_image_mib=3) as address:
        (own, claude), (other, _) = clients(address, "generate"), clients(address, "admin")
        names = [own.files.create(file=("x.png", content), purpose="vision").id for content in given]
        part = {"type": "file", "file": {"file_id": names[0]}}
        chat = own.chat.completions.create(model="m", messages=chat_of(text("see "), part, image_url(given[1])))
        assert chat.choices[0].message.content == "see <image><image>" and contents(core) == given[:2]
        seen = [{"role": "user", "content": [{"type": "input_image", "file_id": names[2], "detail": "low"}]}]
        first = own.responses.create(model="m", input=seen)
        assert contents(core) == given[2:] and core.submitted[-1].images[0].max_pixels == 512 * 512
        own.responses.create(model="m", previous_response_id=first.id, input="and?")
        assert contents(core) == given[2:]
        block = {"type": "image", "source": {"type": "file", "file_id": names[1]}}
        claude.messages.create(model="m", max_tokens=9, messages=chat_of(block))
        assert contents(core) == [given[1]]
        words = own.files.create(file=("x.txt", b"no image"), purpose="user_data").id
        large = own.files.create(file=("x.png", bytes(4 << 20)), purpose="vision").id
        for client, name, why in ((other, names[0], "no such File object"), (own, "file-none", "no such File object"),
                                  (own, words, "none of PNG"), (own, large, "may have at most 3145728")):
            part["file"]["file_id"] = name
            with pytest.raises(openai.BadRequestError, match=why) as caught:
                client.chat.completions.create(model="m", messages=chat_of(text("see "), part))
            assert caught.value.param == "messages[0].content[1].file.file_id"
        own.files.delete(names[2])
        with pytest.raises(openai.BadRequestError, match="no such File object") as caught:
            own.responses.create(model="m", previous_response_id=first.id, input="and?")
        assert caught.value.param == "previous_response_id.content[0].file_id"


# --- refusals ----------------------------------------------------------------------------------------------------


def test_models_that_see_nothing(scripted, seeing, client):
    assert client.get("/v1/models").json()["data"][0]["capabilities"] == {"vision": True}
    picture, = pictures()
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(picture)}
    with httpx.Client(base_url=f"http://{scripted['hermes'][0]}", timeout=60) as blind:
        assert blind.get("/v1/models").json()["data"][0]["capabilities"] == {"vision": False}
        for path, body, param in (
                ("/v1/chat/completions", {"messages": chat_of(text("x"), image_url(picture))},
                 "messages[0].content[1].image_url"),
                ("/tokenize", {"messages": chat_of(image_url(picture))}, "messages[0].content[0].image_url"),
                ("/v1/responses", {"input": [{"role": "user", "content": [
                    {"type": "input_image", "image_url": data_url(picture)}]}]}, "input[0].content[0].image_url")):
            error = refusal(blind, path, {"model": "m", **body})
            assert error["message"].endswith(": the model 'm' sees no images") and error["param"] == param
        body = {"model": "m", "max_tokens": 5, "messages": chat_of({"type": "image", "source": source})}
        answer = blind.post("/v1/messages", json=body)
        assert answer.status_code == 400
        assert "content[0].source.data': the model 'm' sees no images" in answer.json()["error"]["message"]


@pytest.mark.parametrize("url, why", [
    ("data:image/png;base64,", "is empty"), ("data:image/png;base64,AA=A", "not valid base64"),
    ("data:image/png;base64,QUJD", "none of PNG, JPEG, GIF, WebP"), ("data:image/png,QUJD", "no data URL of an image"),
    ("data:text/plain;base64,QUJD", "no data URL of an image"), ("data:", "no data URL of an image"),
    (f"data:image/png;base64,{base64_of(bytes(1200))}", "none of PNG"), ("", "neither a data URL nor"),
    ("/etc/passwd", "neither a data URL nor"), ("file:///etc/passwd", "neither a data URL nor"), ("\0", "neither"),
    ("http://127.0.0.1:22/", "no public address"), ("http://localhost/x.png", "no public address"),
    ("http://169.254.169.254/latest/meta-data", "no public address"), ("https://[::1]/", "no public address"),
    ("http://0x7f000001/", "no public address"), ("http://user@10.0.0.1/", "a user's name"),
    ("http://nowhere.invalid/x", "is not known"), ("http://x:y", "is no URL"), ("h" * 100_000, "8192 characters"),
    (data_url(encoded(pixels(700, 700))), "an image may have at most 1048576")])
def test_hostile_urls(client, url, why):
    error = refusal(client, "/v1/chat/completions", {**SEEN, "messages": chat_of(text("x"), image_url(b"GIF89a"), {
        "type": "image_url", "image_url": {"url": url}})})
    assert why in error["message"] and error["param"] == "messages[0].content[2].image_url"
    assert len(error["message"]) < 500


@pytest.mark.parametrize("part, place", [
    ({"type": "image_url"}, ".image_url"), ({"type": "image_url", "image_url": {}}, ".image_url.url"),
    ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, ".image_url.detail"),
    ({"type": "image_url", "image_url": {"url": "x", "more": 1}}, ".image_url.more"),
    ({"type": "image_url", "image_url": {"url": "x"}, "more": 1}, ".more"),
    ({"type": "image_url", "image_url": "x", "more": 1}, ".more"), ({"type": "text", "text": "x", "more": 1}, ".more"),
    ({"type": "text", "text": 1}, ".text"), ({"type": "image_url", "image_url": 1}, ".image_url"),
    ({"type": "image", "image": "/etc/passwd"}, ".type"), ({"type": "video_url"}, ".video_url"),
    ({"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, ".video_url"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,QQ=="}}, ".video_url"),
    ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,QQ=="}}, ".video_url"),
    ({"type": "video_url", "video_url": {"url": "x", "fps": 0}}, ".video_url.fps")])
def test_errors_name_the_field(client, part, place):
    error = refusal(client, "/v1/chat/completions", {**SEEN, "messages": chat_of(text("x"), part)})
    assert error["param"] == f"messages[0].content[1]{place}"


@pytest.mark.parametrize("part", [
    {"type": "image_url"}, {"type": "image_url", "image_url": 1}, {"type": "image_url", "image_url": {}},
    {"type": "image_url", "image_url": {"url": None}}, {"type": "image", "image": "/etc/passwd"},
    {"type": "image_url", "image_url": {"url": "x", "detail": "huge"}},
    {"type": "image_url", "image_url": {"url": "x", "more": 1}},
    {"type": "image_url", "image_url": {"url": "x", "max_pixels": 0}}, {"type": "video_url", "video_url": {"url": "x"}},
    {"type": "image_url", "image_url": {"url": "x", "max_pixels": 2**31}}, {"type": "input_image", "image_url": "x"}])
def test_wrong_parts(client, part):
    error = refusal(client, "/v1/chat/completions", {**SEEN, "messages": chat_of(part)})
    assert error["param"].startswith("messages[0].content[0]")


def test_fuzzed_parts(client):
    """Whatever stands where an image should, it is the client's mistake."""
    rng = random.Random()
    good = data_url(pictures()[0])
    words = ["http://", "https://", "data:", "image/png", ";base64", ",", "[", "]", "@", ":", "/", "%00", "\\", "..",
             "é", " ", "127.0.0.1", "::1", "#", "?", "\u202e", "A" * 99, "\ud800", None, 7, [], {}, True]
    for _ in range(150):
        pieces = [rng.choice(words) for _ in range(rng.randrange(1, 7))]
        url = "".join(map(str, pieces)) if rng.random() < 0.8 else pieces[0]
        if rng.random() < 0.3:
            at = rng.randrange(len(good))
            url = good[:at] + rng.choice(["", "!", "=", "é", "\0"]) + good[at + rng.randrange(1, 9):]
        where = {"url": url} if rng.random() < 0.7 else url
        body = {**SEEN, "max_tokens": 1, "messages": chat_of({"type": "image_url", "image_url": where})}
        answer = client.post("/v1/chat/completions", content=json.dumps(body).encode(),
                             headers={"content-type": "application/json"})
        if answer.status_code != 200:       # some changes of a file are not seen before it is decoded
            assert answer.status_code == 400 and answer.json()["error"]["message"], (where, answer.text)


def test_other_refusals(client, seeing):
    chat = "/v1/chat/completions"
    picture = image_url(pictures()[0])
    error = refusal(client, chat, {**SEEN, "messages": chat_of(*[picture] * 257)})
    assert error["param"] == "messages[0].content[256].image_url" and "may have 256" in error["message"]
    error = refusal(client, chat, {**SEEN, "messages": chat_of(image_url(pictures()[0], min_pixels=8, max_pixels=7))})
    assert "min_pixels=8 is above max_pixels=7" in error["message"]
    for body in ({"mm_processor_kwargs": {"fps": 0}}, {"mm_processor_kwargs": {"max_pixels": "7"}}):
        assert refusal(client, chat, {**SEEN, **body, "messages": chat_of(picture)})["param"].startswith("mm_processor")
    refusal(client, chat, {**SEEN, "messages": chat_of(text("x")), "prediction": {
        "type": "content", "content": [picture]}})
    for item, param in (({"type": "input_image"}, ".image_url"), ({"type": "input_image", "file_id": "f"}, ".file_id"),
                        ({"type": "input_image", "file_id": "f", "image_url": "x"}, ".file_id"),
                        ({"type": "input_image", "file_id": ""}, ".file_id"),
                        ({"type": "input_image", "image_url": "x"}, ".image_url")):
        error = refusal(client, "/v1/responses", {**SEEN, "input": [{"role": "user", "content": [item]}]})
        assert error["param"] == f"input[0].content[0]{param}"
    for source in ({}, {"type": "file", "file_id": "f"}, {"type": "base64", "media_type": "image/bmp", "data": "AA=="},
                   {"type": "base64", "media_type": "image/png", "data": ""}, {"type": "url", "url": "http://10.0.0.1"},
                   {"type": "base64", "media_type": "image/png", "data": "!"}):
        body = {**SEEN, "max_tokens": 5, "messages": chat_of({"type": "image", "source": source})}
        answer = client.post("/v1/messages", json=body)
        assert answer.status_code == 400, answer.text
        assert "messages[0].content[0].source" in answer.json()["error"]["message"]


def test_images_in_anthropics_system_prompt(claude):
    """Its published types have texts alone there, too."""
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(pictures()[0])}
    with pytest.raises(anthropic.BadRequestError, match="'system': the system prompt is text; put images into a mess"):
        claude.messages.create(model="m", max_tokens=9, messages=chat_of(text("x")),
                               system=[text("see"), {"type": "image", "source": source}])


def test_a_group_that_cannot_decode_now(seeing, client):
    """Its own trouble is no mistake of the client's: the request may be sent again."""
    seeing[1].refusal = AllSparkError(AsStatus.ALLSPARK_RUNTIME_ERROR, "the server is too busy", retryable=True)
    try:
        answer = client.post("/v1/chat/completions", json={**SEEN, "messages": chat_of(image_url(pictures()[0]))})
    finally:
        seeing[1].refusal = None
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == "the server is too busy"


def test_what_the_operator_has_not_allowed():
    """Without --allow-image-hosts nothing is fetched; and what a group refuses for its size is the client's mistake."""
    core, chat = ScriptEngine("hermes", sees_images=True), "/v1/chat/completions"
    with serving(core=core, max_message=1 << 18) as (_, group), http_server_for(group, insecure=True) as address, \
            httpx.Client(base_url=f"http://{address}") as client:
        body = {**SEEN, "messages": chat_of({"type": "image_url", "image_url": {"url": "https://example.com/x.png"}})}
        assert "--allow-image-hosts" in refusal(client, chat, body)["message"]
        body = {**SEEN, "messages": chat_of({"type": "file", "file": {"file_id": "file-1"}})}
        error = refusal(client, chat, body)
        assert "--store" in error["message"] and error["param"] == "messages[0].content[0].file.file_id"
        body = {**SEEN, "messages": chat_of(image_url(encoded(pixels(300, 300))))}
        assert "--max-message-mib" in refusal(client, chat, body)["message"]
