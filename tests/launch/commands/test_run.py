"""`allspark run` with images."""
from __future__ import annotations

import subprocess
import sys

from allspark_launch.cli import main
from support.fake_engine import FakeEngine
from support.fake_service import serving
from support.pictures import encoded, pixels


def test_images(tmp_path, capsys):
    """They stand before the prompt, in order."""
    given = [encoded(pixels(), form) for form in ("PNG", "JPEG")]
    words = []
    for i, content in enumerate(given):
        (tmp_path / str(i)).write_bytes(content)
        words += ["--image", str(tmp_path / str(i))]
    core = FakeEngine(0.001, sees_images=True)
    with serving(core=core) as (_, address):
        assert main(["run", "--address", address, "--max-new-tokens", "3", *words, "what differs?"]) == 0
        assert [image.content for image in core.submitted[-1].images] == given
        prompt = bytes(core.submitted[-1].input_ids).decode()
    parts = "{'type': 'image'}, {'type': 'image'}, {'type': 'text', 'text': 'what differs?'}"
    assert parts in prompt and "3 tokens" in capsys.readouterr().err


def test_a_model_that_sees(tmp_path):
    """A large image is made so small that the context has room for the prompt and the answer."""
    from support.vision import checkpoint

    (tmp_path / "picture").write_bytes(encoded(pixels(1900, 1400)))
    done = subprocess.run(
        [sys.executable, "-m", "allspark_launch", "run", "--model", str(checkpoint("qwen2-vl")), "--greedy", "--ranks",
         "1", "--max-length", "256", "--max-new-tokens", "5", "--image", str(tmp_path / "picture"), "the dog"],
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and "1 rank(s), 5 tokens" in done.stderr


def test_files_that_are_no_images(tmp_path, capsys):
    """They are refused before a group starts."""
    (tmp_path / "text").write_text("hello")
    for name, why in (("missing", "No such file"), ("text", "none of PNG, JPEG, GIF, WebP"), (".", "no regular file")):
        assert main(["run", "--image", str(tmp_path / name), "what is it?"]) == 1
        assert why in (error := capsys.readouterr().err) and repr(str(tmp_path / name)) in error
