"""Models by their id on the Hugging Face Hub: from a cache, and from a fake Hub."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import shutil
import threading

import pytest

from allspark_client import AllSparkError, AsModelConfig, AsStatus
from allspark_launch.cli import build_parser
from allspark_launch.group.background import shipped_model
from allspark_server import Engine
from allspark_server.access import ModelRoots
from allspark_server.weights.hub import hub_name, is_hub_id, local_directory, with_local_paths

hub = pytest.importorskip("huggingface_hub")
ID, COMMIT = "allspark/fable", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def fill(cache, *left_out):
    """Puts the shipped model into the cache in the way of a download: as links to blobs."""
    folder = cache / "models--allspark--fable"
    snapshot = folder / "snapshots" / COMMIT
    for path in (snapshot, folder / "refs", folder / "blobs"):
        path.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for file in shipped_model().iterdir():
        if file.name not in left_out:
            shutil.copy(file, folder / "blobs" / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return str(snapshot)


class Hub(http.server.BaseHTTPRequestHandler):
    """A fake of the Hub, as far as a download needs it."""

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        files = {file.name: file for file in shipped_model().iterdir()}
        path = self.path.split("?")[0]
        if path.startswith(f"/api/models/{ID}/revision/"):
            siblings = [{"rfilename": name} for name in [*files, "model.onnx", "run.py"]]
            self.answer(json.dumps({"id": ID, "sha": COMMIT, "siblings": siblings}).encode(), body)
        elif path.startswith(f"/api/models/{ID}/tree/"):
            tree = [{"type": "file", "oid": "0", "path": name, "size": file.stat().st_size}
                    for name, file in files.items()] + [{"type": "file", "oid": "0", "path": "run.py", "size": 1}]
            self.answer(json.dumps(tree).encode(), body)
        elif path.startswith(f"/{ID}/resolve/") and path.rpartition("/")[2] in files:
            self.answer(files[path.rpartition("/")[2]].read_bytes(), body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

    def answer(self, data, body):
        self.server.asked.append(self.path)
        self.send_response(200)
        for name, value in (("content-length", str(len(data))), ("x-repo-commit", COMMIT),
                            ("etag", f'"{hashlib.sha1(data).hexdigest()}"'), ("content-type", "application/json")):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_):
        return


@contextlib.contextmanager
def a_hub(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_HOME"):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
                        endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_is_an_id(tmp_path):
    assert is_hub_id("Qwen/Qwen2.5-0.5B-Instruct") and is_hub_id("org/name@main")
    for path in ("name", "/org/name", "./org/name", "~/name", "a/b/c", "org/", "org/name.asgraph@"):
        assert not is_hub_id(path), path
    (tmp_path / "org/name").mkdir(parents=True)
    assert not is_hub_id("org/name") and local_directory("org/name") == "org/name"
    assert hub_name("Qwen/Qwen2.5-0.5B-Instruct@main") == "Qwen2.5-0.5B-Instruct"


def test_from_the_cache(cache):
    snapshot = fill(cache)
    assert local_directory(ID) == local_directory(f"{ID}@{COMMIT}") == snapshot
    config = with_local_paths(AsModelConfig("m", ID, draft_model=ID))
    assert config.model_path == config.draft_model == snapshot
    with Engine() as engine:
        engine.install_model(AsModelConfig("m", ID, engine_max_length=64))
        engine.start_model("m")
        assert engine.tokenize("m", {"text": "Once"})


def test_what_cannot_be_had(cache):
    with pytest.raises(AllSparkError, match=f"'{ID}'.*not in the local cache, and HF_HUB_OFFLINE is set") as found:
        local_directory(ID)
    assert found.value.status is AsStatus.ALLSPARK_IO_ERROR
    fill(cache, "model.safetensors")
    with pytest.raises(AllSparkError, match="has only a part of it, and HF_HUB_OFFLINE"):
        local_directory(ID)
    with pytest.raises(AllSparkError, match="not in the local cache"):
        local_directory(f"{ID}@other")


def test_download(monkeypatch, cache):
    with a_hub(monkeypatch) as server:
        path = local_directory(ID)
        assert {file.name for file in shipped_model().iterdir()} == \
            {file.name for file in (cache / "models--allspark--fable/snapshots" / COMMIT).iterdir()}
        asked = len(server.asked)
        assert local_directory(ID) == path
        assert server.asked[asked:] == [], "what is there whole is not asked for"
        with pytest.raises(AllSparkError, match="no such model, or it is private and needs a token"):
            local_directory("allspark/other")
        with pytest.raises(AllSparkError, match="may not download models"):
            local_directory("allspark/other", download=False)


def test_without_a_network(monkeypatch):
    with a_hub(monkeypatch):
        pass    # it has ended: nobody listens there
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(AllSparkError, match="the Hub cannot be reached"):
        local_directory(ID)


def test_who_may_name_models(cache, tmp_path):
    snapshot = fill(cache)
    denied = ModelRoots([str(tmp_path / "cache" / "..")])
    assert not denied.everywhere and ModelRoots(["/"]).everywhere
    ModelRoots([], [AsModelConfig("m", snapshot)]).check_model(with_local_paths(AsModelConfig("m", ID)))
    with pytest.raises(AllSparkError, match="outside of the directories"):
        ModelRoots([]).check_model(with_local_paths(AsModelConfig("m", ID)))


def test_on_the_command_line(cache):
    from allspark_launch.options import group_options

    snapshot = fill(cache)
    options = group_options(build_parser().parse_args(["serve", "--model", ID]))
    assert [(m["model_name"], m["model_path"]) for m in options.models] == [("fable", snapshot)]
    with pytest.raises(AllSparkError, match="is not available"):
        group_options(build_parser().parse_args(["serve", "--model", "allspark/other"]))
