"""The HTTP server with programs that were written for other servers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from support.http_helpers import KEYS, MODEL, STORY

KEY = KEYS["generate"]


@pytest.fixture(scope="module")
def story(http_server):
    with http_server.client() as client:
        body = {"model": MODEL, "messages": STORY, "temperature": 0, "max_tokens": 24}
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(http_server, story):
    def curl(path: str, body: dict, *more: str) -> str:
        return subprocess.run(
            ["curl", "-sS", "--max-time", "30", http_server.url + path, "-H", f"Authorization: Bearer {KEY}",
             "-H", "Content-Type: application/json", "-d", json.dumps(body), *more],
            capture_output=True, text=True, check=True).stdout

    body = {"model": MODEL, "messages": STORY, "temperature": 0, "max_tokens": 24}
    assert json.loads(curl("/v1/chat/completions", body))["choices"][0]["message"]["content"] == story
    lines = curl("/v1/chat/completions", {**body, "stream": True}, "-N").strip().split("\n\n")
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == story


@pytest.mark.slow
def test_litellm(http_server, story):
    litellm = pytest.importorskip("litellm")
    ask = {"model": f"openai/{MODEL}", "messages": STORY, "api_base": http_server.url + "/v1", "api_key": KEY,
           "temperature": 0, "max_tokens": 24}
    assert litellm.completion(**ask).choices[0].message.content == story
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **ask)]
    assert "".join(pieces) == story
    found = litellm.embedding(f"openai/{MODEL}", ["A fox"], api_base=http_server.url + "/v1", api_key=KEY)
    assert len(found.data[0]["embedding"]) > 10
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**ask, "max_tokens": 5000})


@pytest.mark.slow
def test_langchain(http_server, story):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model=MODEL, base_url=http_server.url + "/v1", api_key=KEY, temperature=0,
                                max_tokens=24)
    prompt = STORY[0]["content"]
    assert chat.invoke(prompt).content == story
    assert "".join(piece.content for piece in chat.stream(prompt)) == story
    embed = langchain.OpenAIEmbeddings(model=MODEL, base_url=http_server.url + "/v1", api_key=KEY,
                                       check_embedding_ctx_length=False)
    one, two = embed.embed_documents(["A fox", "A dog"])
    assert len(one) == len(two) and one != two


@pytest.mark.slow
def test_lm_eval(http_server, tmp_path):
    """A local task through local-completions: log probabilities of given texts, and generated texts."""
    pytest.importorskip("lm_eval")
    from allspark_launch.group.background import shipped_model

    questions = [{"text": "Once upon a time there was a fox", "good": " who", "bad": " zz"}] * 4
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (tmp_path / "fox.yaml").write_text(f"""\
task: fox
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["{{{{good}}}}", "{{{{bad}}}}"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
""")
    arguments = (f"model={MODEL},base_url={http_server.url}/v1/completions,tokenizer={shipped_model()},"
                 "tokenized_requests=False,num_concurrent=2,max_length=512")
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "fox",
         "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "OPENAI_API_KEY": KEY, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())
    assert found["results"]["fox"]["acc,none"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schemathesis(http_server, tmp_path):
    """Requests generated from the server's own OpenAPI description, for an existing model: no 5xx, no hang."""
    program = Path(sys.executable).with_name("schemathesis")
    if not program.exists():
        pytest.skip("schemathesis is not installed")
    description = httpx.get(http_server.url + "/openapi.json").json()
    for name, schema in description["components"]["schemas"].items():
        fields = schema.get("properties", {})
        if "model" in fields and name.endswith(("Request", "Prompt")):
            fields["model"] = {"const": MODEL}
        for field in ("max_tokens", "max_output_tokens"):
            if field in fields:
                fields[field] = {"type": "integer", "minimum": 1, "maximum": 8}
                schema["required"] = [*schema.get("required", []), field]
        for field in [field for field, kind in fields.items() if set(kind) <= {"title", "default"}]:
            del fields[field]       # those that are refused whatever they hold
    (tmp_path / "api.json").write_text(json.dumps(description))
    done = subprocess.run(
        [program, "run", tmp_path / "api.json", "--url", http_server.url, "--max-examples", "40", "--request-timeout",
         "30", "--checks", "not_a_server_error,status_code_conformance,content_type_conformance", "--phases",
         "coverage,fuzzing", "-H", f"Authorization: Bearer {KEY}"],
        capture_output=True, text=True, timeout=550, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
