"""`allspark run` with images."""
from __future__ import annotations

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
