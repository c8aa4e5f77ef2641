"""Images from what callers give to the request that rank 0 has: forms, places, errors, resumption."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import PIL.Image
import pytest

from allspark_client import (
    AllSparkError,
    AsStatus,
    AsyncClientEngine,
    ClientEngine,
    GenerateRequestStatus as Status,
    convert,
    images,
)
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.affinity import beginnings
from allspark_client.engine import request_spec
from allspark_client.images import Image, Video, as_image, as_video, take_images
from support.fake_engine import FakeEngine
from support.fake_service import serving, tokens, wait_until
from support.pictures import data_url, decoded, encoded, pixels
from support.versions import wire


def chat_of(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WebP", "GIF"])
def test_encoded_files_stay_as_they_are(form, tmp_path):
    content = encoded(pixels(), form)
    path = tmp_path / "a picture"
    path.write_bytes(content)
    file = io.BytesIO(content)
    for given in (content, bytearray(content), memoryview(content), path, data_url(content, f"image/{form.lower()}"),
                  data_url(content, ""), Image(content)):
        assert as_image(given) == Image(content)
    assert file.tell() == 0


def test_arrays_and_pictures_are_encoded_without_loss():
    array = pixels()
    for given in (array, array[::-1, ::-1][::-1, ::-1], PIL.Image.fromarray(array)):
        assert np.array_equal(decoded(as_image(given).content), array)
    jpeg = PIL.Image.open(io.BytesIO(encoded(array, "JPEG")))      # not decoded yet
    assert np.array_equal(decoded(as_image(jpeg).content), np.asarray(jpeg))
    assert as_image(array).digest == as_image(array.copy()).digest != as_image(array, 0, 100).digest


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK", "YCbCr", "HSV", "F", "PA", "RGBa"])
def test_pictures_of_any_mode(mode):
    array = pixels()
    picture = PIL.Image.fromarray(array[..., 0].astype(np.uint16)) if mode == "I;16" else \
        PIL.Image.fromarray(array).convert("RGBA").convert(mode) if mode in ("PA", "RGBa") else \
        PIL.Image.fromarray(array).convert(mode)
    found = PIL.Image.open(io.BytesIO(as_image(picture).content))
    has_alpha = mode in ("LA", "RGBA", "PA", "RGBa")
    assert found.size == picture.size and ("A" in found.mode) == has_alpha
    if mode in images._PNG_MODES:
        assert np.array_equal(np.asarray(found), np.asarray(picture))
    else:
        assert np.array_equal(np.asarray(found), np.asarray(picture.convert("RGBA" if has_alpha else "RGB")))


def test_a_picture_stands_upright():
    array = pixels(8, 24)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6        # to be turned by 90 degrees
    picture = PIL.Image.open(io.BytesIO(encoded(array, "PNG", exif=exif)))
    assert np.array_equal(decoded(as_image(picture).content), np.rot90(array, -1))


@pytest.mark.parametrize("given, error, text", [
    (b"", ValueError, "is empty: that is none of PNG, JPEG, GIF, WebP"),
    (b"BM" + bytes(99), ValueError, r"begins with b'BM\\x00.*none of PNG"),
    ("/etc/passwd", ValueError, "no data URL.*pathlib.Path"),
    ("https://example.com/x.png", ValueError, "fetches no URLs"),
    ("data:text/html;base64,AAAA", ValueError, "no data URL of an image"),
    ("data:image/png,AAAA", ValueError, "no data URL of an image"),
    ("data:" + "x" * 10_000_000, ValueError, "no data URL of an image"),
    ("data:image/png;base64,A!AA", ValueError, "not valid base64"),
    ("data:image/png;base64,AAAAé", ValueError, "not valid base64"),
    (Path("/nowhere/x.png"), ValueError, "'/nowhere/x.png' cannot be read: No such file"),
    (Path("/"), ValueError, "no regular file"),
    (np.zeros((4, 4, 3), np.float32), ValueError, r"type float32 and shape \[4, 4, 3\]"),
    (np.zeros((4, 4), np.uint8), ValueError, r"shape \[4, 4\]"),
    (np.zeros((0, 4, 3), np.uint8), ValueError, r"shape \[0, 4, 3\]"),
    (7, TypeError, "an image must be .*not int"),
    (PIL.Image.new("RGB", (0, 3)), ValueError, "PIL image cannot be read"),
])
def test_what_is_no_image_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        as_image(given)
    with pytest.raises(error, match=r"images\[1\]: .*" + text):
        request_spec("m", {"text": "x", "images": [encoded(pixels()), given]}, None)
    with pytest.raises(error, match=r"messages\[0\]\['content'\]\[1\]: .*" + text):
        take_images(chat_of({"type": "text", "text": "x"}, {"type": "image", "image": given}))


def test_pipes_and_large_files_are_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        as_image(tmp_path / "pipe")
    monkeypatch.setattr(images, "MAX_BYTES", 50)
    (tmp_path / "large").write_bytes(encoded(pixels(8, 8)))
    for given in (tmp_path / "large", encoded(pixels(8, 8))):
        with pytest.raises(ValueError, match=r"has \d+ bytes.* at most 50"):
            as_image(given)
    monkeypatch.setattr(images, "MAX_IMAGES", 2)
    with pytest.raises(ValueError, match=r"content'\]\[2\] is one image too many; a request may have 2"):
        take_images(chat_of(*[{"type": "image"}] * 3), [b"GIF89a"] * 2)


def test_a_truncated_picture_is_refused():
    with pytest.raises(ValueError, match="PIL image cannot be read"):
        as_image(PIL.Image.open(io.BytesIO(encoded(pixels(30, 30))[:300])))


def test_without_pillow(monkeypatch):
    """The thin client needs none for encoded files."""
    lines = "import sys, allspark_client; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", lines], check=True)
    content = encoded(pixels())
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image")
    assert as_image(content).content == content
    with pytest.raises(ValueError, match="pip install pillow"):
        as_image(pixels())


# --- places ------------------------------------------------------------------------------------------------------


def test_images_anywhere_in_a_chat(tmp_path):
    arrays = [pixels() for _ in range(6)]
    path = tmp_path / "x.png"
    path.write_bytes(encoded(arrays[3]))
    chat = [
        {"role": "system", "content": [{"type": "image", "image": arrays[0]}, {"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": data_url(encoded(arrays[1])), "detail": "low"}, "max_pixels": 9},
            {"type": "text", "text": "and"},
            {"type": "image", "image": PIL.Image.fromarray(arrays[2]), "min_pixels": 4}]},
        {"role": "assistant", "content": "hm", "tool_calls": []},
        {"role": "tool", "content": [{"type": "image", "path": path}, {"type": "image"}]},
        {"role": "user", "content": [
            {"type": "image_url", "image_url": data_url(encoded(arrays[5]))},
            {"type": "image", "base64": base64.encodebytes(encoded(arrays[5])).decode()}]},
    ]
    before = repr(chat)
    spec = request_spec("m", {"messages": chat, "images": [arrays[4]]}, None)
    assert repr(chat) == before
    for found, array in zip(spec.images, [*arrays, arrays[5]], strict=True):
        assert np.array_equal(decoded(found.content), array)
    assert [(one.min_pixels, one.max_pixels) for one in spec.images][:3] == [(0, 0), (0, 9), (4, 0)]
    assert spec.messages[2] == chat[2]
    kinds = [[part["type"] for part in message["content"]] for message in (*spec.messages[:2], *spec.messages[3:])]
    assert kinds == [["image", "text"], ["image", "text", "image"], ["image"] * 2, ["image"] * 2]
    assert convert.request_from_pb(convert.request_to_pb(spec)).images == spec.images


def test_detail_and_bounds():
    def of(**part) -> tuple[int, int]:
        detail = {"detail": part.pop("detail")} if "detail" in part else {}
        url = {"url": data_url(encoded(pixels())), **detail}
        _, (image,) = take_images(chat_of({"type": "image_url", "image_url": url, **part}))
        return image.min_pixels, image.max_pixels

    assert of() == of(detail="auto") == of(detail="high") == of(detail=None) == (0, 0)
    assert of(detail="low") == (0, 512 * 512) and of(detail="low", max_pixels=7) == (0, 7)
    for part, text in (({"detail": "tiny"}, "detail='tiny' is not known; allowed: 'auto', 'low'"),
                       ({"min_pixels": 5, "max_pixels": 4}, "min_pixels=5 is above max_pixels=4"),
                       ({"max_pixels": -1}, "max_pixels=-1"), ({"max_pixels": 2**40}, "max_pixels=")):
        with pytest.raises(ValueError, match=text):
            of(**part)
    with pytest.raises(TypeError, match="max_pixels must be an int"):
        of(max_pixels="7")


@pytest.mark.parametrize("inputs, text", [
    ({"messages": chat_of({"type": "image"})}, "has no image, and inputs.'images'. has none"),
    ({"messages": chat_of({"type": "text", "text": "x"}), "images": [b"GIF89a"]}, "1 images, and the messages have 0"),
    ({"messages": chat_of({"type": "image", "image": b"GIF89a", "path": Path("x")})}, "it has image and path"),
    ({"messages": chat_of({"type": "image_url"})}, "image_url must be a dict such as"),
    ({"messages": chat_of({"type": "image_url", "image_url": {"url": b"GIF89a"}})}, "image_url must be a dict such as"),
    ({"messages": chat_of({"type": "audio", "audio": "x"})}, "type='audio' is not offered; allowed: .*'video'"),
    ({"messages": chat_of({"type": "video", "video": "x"})}, "'x' is no data URL of a video's frames"),
    ({"messages": chat_of({"type": "video"})}, r"content'\]\[0\]: it has no video; a video has its frames in 'video'"),
    ({"messages": chat_of({"type": "video", "video": b"GIF89a"})}, "a video must be a list of frames.* files are not"),
    ({"messages": chat_of({"type": "video", "video": []})}, "the video has 0 frames; allowed: 1 to 768"),
    ({"messages": chat_of({"type": "video", "video": [b"GIF89a", b"x"]})}, "frame 1: the image begins with b'x'"),
    ({"messages": chat_of({"type": "video", "video": [b"GIF89a"], "fps": 0})}, "fps=0: a video has from 0.01 to 1000"),
    ({"messages": chat_of({"type": "video_url", "video_url": "data:video/mp4;base64,QQ=="})}, "is no data URL of"),
    ({"text": "x", "images": b"GIF89a"}, "images must be a list"),
    ({"input_ids": [1], "images": [b"GIF89a"] * 257}, "images has 257 images; allowed: at most 256"),
])
def test_wrong_places_are_refused(inputs, text):
    with pytest.raises((ValueError, TypeError), match=text):
        request_spec("m", inputs, None)


def test_rank_0_reads_no_part_itself():
    """A client in another language cannot make the server read files, and each part needs its image."""
    image, part = pb.Image(content=encoded(pixels())), '{"role": "user", "content": [{"type": "image"}]}'
    for sent_json, sent, text in (
            ('{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}', [], "'images'"),
            ('{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}', [], "not offered"),
            ('{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}', [image], "1 images.* 2 parts"),
            (part, [pb.Image(content=b"%PDF-1.7")], r"images\[0\]: .*PDF"),
            (part, [pb.Image(content=b"GIF89a", min_pixels=-1)], r"images\[0\]: min_pixels=-1")):
        message = pb.GenerateRequest(model="m", chat=pb.Chat(messages=[pb.ChatMessage(json=sent_json)]), images=sent)
        with pytest.raises(ValueError, match=text):
            convert.request_from_pb(message)


def test_affinity_sees_images():
    """Chats whose texts are equal and images are not have different prefixes, and a further turn the same ones."""
    words = {"type": "text", "text": "what is this? " * 40}
    one, other = encoded(pixels(9, 9)), encoded(pixels(9, 9))
    turns = [{"role": "user", "content": [words, {"type": "image"}]}, {"role": "user", "content": [words]}]
    first = beginnings(request_spec("m", {"messages": turns, "images": [one]}, None))
    again = beginnings(request_spec("m", {"messages": [*turns, *turns], "images": [one, other]}, None))
    apart = beginnings(request_spec("m", {"messages": turns, "images": [other]}, None))
    assert len(first) == 2 and again[:2] == first and not {d for d, _ in first} & {d for d, _ in apart}
    ids = [beginnings(request_spec("m", {"input_ids": [5] * 200, "images": [image]}, None)) for image in (one, other)]
    assert len(ids[0]) == 2 and not set(ids[0]) & set(ids[1])


# --- on the way --------------------------------------------------------------------------------------------------


def inputs_with(count: int, seed: int) -> dict:
    """A prompt of one of the three kinds with images."""
    given = [pixels() for _ in range(count)]
    if seed % 3 == 0:
        return {"messages": chat_of(*({"type": "image", "image": one} for one in given), {"type": "text", "text": "?"})}
    return {**({"text": "look"} if seed % 3 == 1 else {"input_ids": [7, 8, 9]}), "images": given}


@pytest.mark.parametrize("seed", range(3))
def test_rank_0_gets_the_images(seed):
    inputs = inputs_with(random.randrange(1, 4), seed)
    wanted = request_spec("m", inputs, None).images
    config = {"max_new_tokens": 3, "seed": 1}
    with serving(core=FakeEngine(0.001, sees_images=True)) as (core, address):
        with ClientEngine(address) as engine:
            assert engine.get_model_info("m").sees_images
            assert engine.tokenize("m", inputs)
            _, _, queue = engine.start_request("m", inputs, config)
            found = tokens(queue)
            assert core.submitted[-1].images == wanted
        _, _, queue = core.start_request("m", inputs, config)
        assert tokens(queue) == found and core.submitted[-1].images == wanted

        async def asynchronous() -> list[int]:
            async with AsyncClientEngine(address) as engine:
                _, _, queue = await engine.start_request("m", inputs, config)
                found = [i async for elements in queue for i in elements.ids_from_generate]
                async with engine.generate("m", inputs, config) as generation:
                    assert (await generation.read()).samples[0].ids_from_generate == found
                return found

        assert asyncio.run(asynchronous()) == found
        assert [spec.images for spec in core.submitted[-2:]] == [wanted] * 2


def test_a_resumed_request_brings_its_images_again():
    """Beside the ids of its prompt, which another server does not render again."""
    inputs = inputs_with(2, 0)
    with serving(core=FakeEngine(0.01, sees_images=True)) as (core, address), ClientEngine(address) as engine:
        undisturbed = tokens(engine.start_request("m", inputs, {"max_new_tokens": 40, "seed": 3})[2])
        _, handle, queue = engine.start_request("m", inputs, {"max_new_tokens": 40, "seed": 3})
        wait_until(lambda: queue.GeneratedLength() > 5, 10)
        request = engine._requests[handle]
        request.session._call.cancel()
        assert tokens(queue) == undisturbed and queue.GenerateStatus() is Status.GenerateFinished
        assert request.resumed
        first, again = core.submitted[-2:]
        assert again.images == first.images and len(again.images) == 2
        assert again.messages is None and again.input_ids == first.input_ids


def test_refusals():
    inputs = {"text": "look", "images": [pixels(300, 300)]}
    with serving() as (core, address), ClientEngine(address) as engine:
        for blind in (core, engine):
            assert not blind.get_model_info("m").sees_images
            with pytest.raises(AllSparkError, match=r"images: model 'm' \(.*\) takes no images") as caught:
                blind.start_request("m", inputs)
            assert caught.value.status is AsStatus.ALLSPARK_INVALID_CALL_ERROR
    core = FakeEngine(sees_images=True)
    with serving(core=core, max_message=1 << 18) as (_, address), ClientEngine(address) as engine:
        text = r"message of \d+ bytes, .* at most 262144 .its --max-message-mib"
        with pytest.raises(AllSparkError, match=text) as caught:
            engine.start_request("m", inputs)
        assert caught.value.status is AsStatus.ALLSPARK_EXCEED_LIMIT_ERROR


def test_prompts_with_images_are_not_cut():
    """Neither by the client, which knows ids, nor on rank 0, which knows those of texts."""
    with serving(core=FakeEngine(0.001, sees_images=True)) as (core, address), ClientEngine(address) as engine:
        for prompt in ({"input_ids": [1, 2, 3]}, {"text": "abc"}):
            for each in (core, engine):
                with pytest.raises(ValueError, match="truncate_prompt_tokens=2 would cut a prompt of 3 tokens"):
                    each.start_request("m", {**prompt, "images": [pixels()]}, {"truncate_prompt_tokens": 2})
                _, _, queue = each.start_request("m", {**prompt, "images": [pixels()]},
                                                 {"truncate_prompt_tokens": 3, "max_new_tokens": 2})
                assert len(tokens(queue)) == 2


def test_an_older_server_is_sent_no_images(tmp_path):
    info = pb.SessionResponse(info=pb.ServerInfo(
        version="1.0", protocol=3, models=[pb.ModelState(name="m", running=True)])).SerializeToString()
    frames = [["client", ""], ["server", base64.b64encode(info).decode()], ["client", ""]]
    calls = [["/allspark.Allspark/GetServerInfo", "", base64.b64encode(
        pb.SessionResponse.FromString(info).info.SerializeToString()).decode()]]
    with wire.playing_server(f"unix:{tmp_path}/s", {"sessions": [frames], "calls": calls}):
        with ClientEngine(f"unix:{tmp_path}/s") as engine:
            with pytest.raises(AllSparkError, match=r"images: the server .* \(version 1.0\) takes none; upgrade it"):
                engine.start_request("m", {"text": "look", "images": [pixels()]})


def test_too_many_images_are_refused_before_they_are_read():
    message = pb.GenerateRequest(model="m", text="x", images=[pb.Image(content=b"GIF89a")] * (images.MAX_IMAGES + 1))
    with serving(core=FakeEngine(sees_images=True)) as (_, address), grpc.insecure_channel(address) as channel:
        call = channel.unary_stream("/allspark.Allspark/Generate", pb.GenerateRequest.SerializeToString,
                                    pb.GenerateResponse.FromString)
        with pytest.raises(grpc.RpcError, match="images has 257 images; allowed: at most 256"):
            next(call(message))


# -- videos ------------------------------------------------------------------------------------------------------------
def test_videos_in_every_form():
    """All become the same frames, which go to rank 0 in the order of the chat."""
    frames = [encoded(pixels(6 + i)) for i in range(3)]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    wanted = Video(tuple(frames), 4.0)
    for part in ({"type": "video", "video": frames, "fps": 4}, {"type": "video", "video": url, "fps": 4.0},
                 {"type": "video", "video": wanted}, {"type": "video_url", "video_url": {"url": url, "fps": 4}},
                 {"type": "video_url", "video_url": url, "fps": 4}):
        spec = request_spec("m", {"messages": chat_of(part, {"type": "image", "image": frames[0]})}, None)
        assert spec.images == [wanted, Image(frames[0])]
        assert [p["type"] for p in spec.messages[0]["content"]] == ["video", "image"]
        again = convert.request_from_pb(convert.request_to_pb(spec))
        assert again.images == spec.images and again.images[0].digest == wanted.digest
    array = np.zeros((2, 5, 7, 3), np.uint8)
    video = as_video(array, min_pixels=9)
    assert video == Video((as_image(array[0]).content,) * 2, 2.0, 9) and video.size == 2 * len(video.frames[0])
    assert len({wanted.digest, Video(wanted.frames, 2.0).digest, Video(wanted.frames[:2], 4.0).digest}) == 3


def test_rank_0_checks_the_kinds_of_parts():
    frame = encoded(pixels())
    for kind, sent, text in (("image", pb.Image(frames=[frame]), r"images\[0\] is a video, and the part"),
                             ("video", pb.Image(content=frame), r"images\[0\] is an image, and the part"),
                             ("video", pb.Image(content=frame, frames=[frame]), "both content and frames"),
                             ("video", pb.Image(frames=[b"x"]), r"images\[0\]: frames\[0\]: the image begins"),
                             ("video", pb.Image(frames=[frame], fps=-1), "fps=-1.0: a video has")):
        message = pb.GenerateRequest(model="m", images=[sent])
        message.chat.messages.add(json=json.dumps({"role": "user", "content": [{"type": kind}]}))
        with pytest.raises(ValueError, match=text):
            convert.request_from_pb(message)
