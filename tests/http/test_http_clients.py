"""The HTTP server with programs that were written for other servers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from support.http_helpers import KEYS, MODEL, STORY
from support.waiting import wait_for

KEY, PROXY_KEY = KEYS["generate"], "sk-proxy"


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


@pytest.fixture(scope="module")
def litellm_proxy(http_server, tmp_path_factory):
    """The URL of LiteLLM's proxy in front of the server, which it calls as OpenAI's, vLLM's and Anthropic's."""
    program = Path(sys.executable).with_name("litellm")
    if not program.exists():
        pytest.skip("litellm[proxy] is not installed")
    folder = tmp_path_factory.mktemp("proxy")
    kinds = {"openai": "openai", "text": "text-completion-openai", "vllm": "hosted_vllm", "claude": "anthropic"}
    models = [{"model_name": name, "litellm_params": {
        "model": f"{kind}/{MODEL}", "api_key": KEY,
        "api_base": http_server.url + ("" if kind == "anthropic" else "/v1")}} for name, kind in kinds.items()]
    config = {"model_list": models, "general_settings": {"master_key": PROXY_KEY},
              "litellm_settings": {"num_retries": 0}}
    (folder / "config.yaml").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [program, "--config", folder / "config.yaml", "--host", "127.0.0.1", "--port", str(port)], cwd=folder,
            env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}, stdout=log,
            stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: process.poll() is not None or _answers(f"{url}/health/liveliness"), 120)
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("model", ["openai", "vllm"])
def test_litellm_proxy(litellm_proxy, story, model):
    """OpenAI's client by LiteLLM's proxy: all that goes through it comes back as the server wrote it."""
    api = openai.OpenAI(base_url=f"{litellm_proxy}/v1", api_key=PROXY_KEY, max_retries=0)
    greedy = {"model": model, "messages": STORY, "temperature": 0, "max_tokens": 24}
    assert api.chat.completions.create(**greedy).choices[0].message.content == story
    chunks = list(api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **greedy))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == story
    assert chunks[-1].usage.completion_tokens == 24
    predicted = api.chat.completions.create(**greedy, logprobs=True, top_logprobs=2,
                                            prediction={"type": "content", "content": story})
    assert predicted.choices[0].message.content == story and len(predicted.choices[0].logprobs.content) == 24
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 12
    asked = {"model": model, "input": STORY[0]["content"], "temperature": 0, "max_output_tokens": 24}
    assert api.responses.create(**asked).output_text == story
    assert [event.type for event in api.responses.create(stream=True, **asked)][-1] == "response.incomplete"
    with pytest.raises(openai.BadRequestError, match="ContextWindowExceededError.*1024 tokens"):
        api.chat.completions.create(**{**greedy, "max_tokens": 5000})


@pytest.mark.slow
def test_litellm_proxy_for_other_endpoints(litellm_proxy, http_server):
    api = openai.OpenAI(base_url=f"{litellm_proxy}/v1", api_key=PROXY_KEY, max_retries=0)
    asked = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
    with http_server.client() as client:
        text = client.post("/v1/completions", json={"model": MODEL, **asked}).json()["choices"][0]["text"]
    assert {api.completions.create(model=model, **asked).choices[0].text for model in ("text", "vllm")} == {text}
    assert len(api.embeddings.create(model="openai", input=["A fox", "A dog"]).data) == 2
    with httpx.Client(base_url=litellm_proxy, headers={"authorization": f"Bearer {PROXY_KEY}"}, timeout=60) as client:
        ranked = client.post("/v1/rerank", json={"model": "vllm", "query": "A fox", "documents": ["A fox", "Bread"]})
        assert {entry["index"] for entry in ranked.json()["results"]} == {0, 1}
        message = {"model": "claude", "messages": STORY, "max_tokens": 8}
        told = client.post("/v1/messages", json=message).json()
        assert told["content"][0]["type"] == "text" and told["usage"]["output_tokens"] == 8
        health = client.get("/health").json()
        assert (health["healthy_count"], health["unhealthy_count"]) == (4, 0), health


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


def lm_eval(http_server, folder: Path, model: str, path: str, task: str, *more: str) -> dict:
    """The results of a task, whose data is local, by lm_eval's client."""
    pytest.importorskip("lm_eval")
    from allspark_launch.group.background import shipped_model

    questions = [{"text": "Once upon a time there was a fox", "good": " who", "bad": " zz"}] * 4
    (folder / "data.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (folder / "fox.yaml").write_text(f"""\
task: fox
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
target_delimiter: ""
{task}
""")
    arguments = (f"model={MODEL},base_url={http_server.url}{path},tokenizer={shipped_model()},"
                 "tokenized_requests=False,num_concurrent=2,max_length=512")
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", "fox",
         "--include_path", folder, "--output_path", folder / "out", *more],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "OPENAI_API_KEY": KEY, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(next((folder / "out").rglob("results*.json")).read_text())["results"]["fox"]


@pytest.mark.slow
def test_lm_eval(http_server, tmp_path):
    """Multiple choice through local-completions: log probabilities of given texts."""
    found = lm_eval(http_server, tmp_path, "local-completions", "/v1/completions", """\
output_type: multiple_choice
doc_to_choice: ["{{good}}", "{{bad}}"]
doc_to_target: 0
metric_list: [{metric: acc}]""")
    assert found["acc,none"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("model,path", [
    ("local-completions", "/v1/completions"), ("local-chat-completions", "/v1/chat/completions")])
def test_lm_eval_generates(http_server, tmp_path, model, path):
    """Generated texts, with as many stop strings as tasks for code have: completions get all of them."""
    with http_server.client() as client:
        asked = {"model": MODEL, "temperature": 0, "max_tokens": 12, "seed": 1234, "stop": "."}
        text = "Once upon a time there was a fox"
        chat = path.endswith("chat/completions")
        asked |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        choice = client.post(path, json=asked).json()["choices"][0]
        right = choice["message"]["content"] if chat else choice["text"]
    found = lm_eval(http_server, tmp_path, model, path, f"""\
output_type: generate_until
doc_to_target: {json.dumps(right)}
generation_kwargs: {{until: [".", "\\nclass", "\\ndef", "\\n#", "\\nif", "\\nprint"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]""", *(["--apply_chat_template"] if chat else []))
    assert found["exact_match,none"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_guidellm(http_server, tmp_path, path):
    """A load test by GuideLLM: every request succeeds, and has the length that it asks for."""
    program = Path(sys.executable).with_name("guidellm")
    if not program.exists():
        pytest.skip("guidellm is not installed")
    from allspark_launch.group.background import shipped_model

    backend = {"kind": "openai_http", "target": http_server.url, "model": MODEL, "api_key": KEY, "request_format": path}
    done = subprocess.run(
        [program, "run", "--backend", json.dumps(backend), "--profile", "kind=concurrent,streams=3", "--constraint",
         "kind=max_requests,count=6", "--tokenizer", f"kind=huggingface_auto,model={shipped_model()}", "--data",
         "kind=synthetic_text,prompt_tokens=20,output_tokens=12", "--output", f"kind=json,path={tmp_path}/out.json",
         "--disable-console"],
        capture_output=True, text=True, timeout=250, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    requests = json.loads((tmp_path / "out.json").read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"], requests["errored"][0]["error"]
    assert len(requests["successful"]) >= 6
    if path != "/v1/embeddings":
        assert {request["output_metrics"]["text_tokens"] for request in requests["successful"]} == {12}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promptfoo") is None, reason="promptfoo (npm) is not installed")
def test_promptfoo(http_server, story, tmp_path):
    """An evaluation over three endpoints, with a text that it must find and counts of tokens that it reads."""
    providers = [{"id": f"openai:{kind}:{MODEL}", "config": {
        "apiBaseUrl": f"{http_server.url}/v1", "apiKey": KEY, "temperature": 0, "max_tokens": 24,
        **({"max_output_tokens": 24} if kind == "responses" else {})}} for kind in ("chat", "completion", "responses")]
    (tmp_path / "config.json").write_text(json.dumps({
        "prompts": [STORY[0]["content"]], "providers": providers,
        "tests": [{"assert": [{"type": "javascript", "value": "output.length > 5"}]}]}))
    done = subprocess.run(
        ["promptfoo", "eval", "-c", tmp_path / "config.json", "-o", tmp_path / "out.json", "--no-cache",
         "--no-progress-bar"], capture_output=True, text=True, timeout=280, cwd=tmp_path,
        env={**os.environ, "PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1",
             "PROMPTFOO_DISABLE_REMOTE_GENERATION": "true", "PROMPTFOO_CONFIG_DIR": str(tmp_path / "own")})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = {result["provider"]["id"].split(":")[1]: result
             for result in json.loads((tmp_path / "out.json").read_text())["results"]["results"]}
    assert all(result["success"] for result in found.values()) and len(found) == 3
    assert found["chat"]["response"]["output"] == found["responses"]["response"]["output"] == story
    assert {result["response"]["tokenUsage"]["completion"] for result in found.values()} == {24}


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
