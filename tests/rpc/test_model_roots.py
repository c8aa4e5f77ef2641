"""Which paths clients may name, and that answers name no others."""

from __future__ import annotations

import pytest

from allspark_client import AllSparkError, AsModelConfig, ClientEngine
from allspark_server.access import ModelRoots
from support.fake_service import serving


@pytest.fixture
def tree(tmp_path):
    """root/good, a checkpoint; root/bad, one with a file from outside; outside/secret; and links between them."""
    good, bad, outside = tmp_path / "root/good", tmp_path / "root/bad", tmp_path / "outside"
    for folder in (good, bad, outside, tmp_path / "root/blobs"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (outside / "secret").write_text("s")
    (tmp_path / "root/blobs/1").write_text("weights")
    (good / "model.safetensors").symlink_to("../blobs/1")       # as the Hub's cache does
    (bad / "tokenizer.json").symlink_to(outside / "secret")
    (tmp_path / "root/way").symlink_to(outside)
    for name in ("root/c1/additional_chat_templates", "root/c2/x.tokenizer"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).symlink_to(outside)
    (tmp_path / "in").symlink_to(good)
    (tmp_path / "root2").mkdir()
    return tmp_path


def test_what_may_be_opened(tree):
    roots = ModelRoots([tree / "root"])
    for path in ("root/good", "root/../root/good", "in", "root", "root/none", "root/good/config.json"):
        roots.check("model_path", str(tree / path))
    refused = ("root/bad", "root/bad/x.asgraph", "root/c1", "root/c2/x.asgraph", "root/way", "root/way/secret",
               "root/../outside", "outside", "root2")
    for path in (*(str(tree / path) for path in refused), "/dev/zero", "/", ".", ""):
        with pytest.raises(AllSparkError, match="^ALLSPARK_REQUEST_DENIED: model_path=.*--model-root DIR") as caught:
            roots.check("model_path", path)
        assert "secret'" not in str(caught.value) or path.endswith("secret")
    with pytest.raises(AllSparkError, match="weights_path="):
        roots.check_model(AsModelConfig("m", str(tree / "root/good"), weights_path=str(tree / "outside/secret")))
    with pytest.raises(AllSparkError, match="draft_model="):
        roots.check_model(AsModelConfig("m", str(tree / "root/good"), draft_model=str(tree / "outside")))
    ModelRoots(["/"]).check("model_path", str(tree / "root/bad"))
    with pytest.raises(ValueError, match="--model-root /nowhere: there is no such directory"):
        ModelRoots(["/nowhere"])


def test_without_roots_only_the_operator_s_models_may_be_opened(tree):
    roots = ModelRoots([], [AsModelConfig("m", str(tree / "root/bad")), AsModelConfig("a", str(tree / "x.asgraph"))])
    roots.check("model_path", str(tree / "root/bad"))       # as it is: it is theirs
    roots.check("as_param_path", str(tree / "x.asparam"))
    for path in ("root/good", "root/bad/config.json", "y.asgraph"):
        with pytest.raises(AllSparkError, match="is outside of the directories that clients"):
            roots.check("model_path", str(tree / path))


def test_paths_of_clients_are_checked(tree):
    with serving(roots=ModelRoots([tree / "root"])) as (core, address), ClientEngine(address) as client:
        client.install_model(AsModelConfig("good", str(tree / "root/good")))
        for path in (tree / "root/bad", tree / "outside", "/dev/zero"):
            with pytest.raises(AllSparkError, match="ALLSPARK_REQUEST_DENIED: model_path="):
                client.install_model(AsModelConfig("x", str(path)))
        assert client.get_file_information(tree / "root/a", tree / "root/b").create_version_graph
        with pytest.raises(AllSparkError, match="as_graph_path='/dev/zero'"):
            client.get_file_information("/dev/zero", tree / "root/b")
        with pytest.raises(AllSparkError, match="as_param_path='/dev/zero'"):
            client.get_file_information(tree / "root/a", "/dev/zero")
        assert {model.name for model in core.list_models()} == {"m", "good"}


def test_answers_name_no_path_that_the_client_has_not_named(tree, monkeypatch):
    """Neither the places of models, nor the object of an unexpected system error."""
    with serving(roots=ModelRoots([tree / "root"])) as (core, address), ClientEngine(address) as client:
        with pytest.raises(AllSparkError) as caught:
            client.install_model(AsModelConfig("x", "/dev/zero"))
        assert str(tree) not in str(caught.value)
        core._models["m"].info.tokenizer_dir = str(tree)
        assert client.get_model_info("m").tokenizer_dir is None

        def fails(name: str) -> None:
            raise PermissionError(13, "Permission denied", str(tree / "secret"))

        monkeypatch.setattr(core, "stop_model", fails)
        with pytest.raises(AllSparkError, match="PermissionError: Permission denied$"):
            client.stop_model("m")
