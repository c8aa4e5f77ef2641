"""The sampling parameters that a checkpoint recommends."""

from __future__ import annotations

import json

from allspark_server.models.generation import sampling_defaults


def test_what_generation_config_says(tmp_path):
    assert sampling_defaults(None) == {} == sampling_defaults(str(tmp_path))
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 1,
                                "repetition_penalty": 1.05, "max_length": 100, "transformers_version": "4"}))
    assert sampling_defaults(str(tmp_path)) == {
        "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    file.write_text(json.dumps({"temperature": 0.0, "top_p": 7, "top_k": None}))
    assert sampling_defaults(str(tmp_path)) == {"do_sample": False}
    file.write_text("[]")
    assert sampling_defaults(str(tmp_path)) == {}
