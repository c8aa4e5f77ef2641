"""Wire messages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from google.protobuf.message import DecodeError

from allspark_client import convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_client.config import AsModelConfig, GenerateConfig
from allspark_client.errors import AllSparkError, AsStatus
from allspark_client.request import RequestSpec
from allspark_client.types import AsEngineStat, GeneratedElements, ModelInfo, ModelState
from fuzz import mutate
from fuzz.target import MESSAGES, REFUSALS, Finding, Target


class Messages(Target):
    """Every message that either side of the wire decodes; decoded messages are encoded again."""

    name, share = "wire", 0.3
    engine = None

    def prepare(self) -> None:
        config = GenerateConfig.parse(
            {
                "top_k": 5,
                "seed": 7,
                "eos_token_id": [2, 3],
                "stop_words_ids": [[1, 2]],
                "n": 2,
                "bad_words_ids": [[4]],
                "max_new_tokens": 5,
                "cache_salt": "s",
                "logprobs": True,
                "top_logprobs": 3,
                "response_format": {"type": "json_object"},
            }
        )
        specs = [
            RequestSpec("m", [1, 2, 3], config=config, generated=[4]),
            RequestSpec("m", text="hello", config=config),
            RequestSpec("m", messages=MESSAGES),
        ]
        elements = convert.elements_to_pb(GeneratedElements([1, 2], [[(1, -0.5)], [(2, -1.0)]], [-0.5, -1.0]))
        error = convert.error_to_pb(AllSparkError(AsStatus.ALLSPARK_PARAM_ERROR, "no"))
        model = convert.model_config_to_pb(AsModelConfig(model_name="m", model_path="/x"))
        stat = convert.stat_to_pb({"arrival_time": 1.0, "context_token_length": 3})
        event = pb.RequestEvent(id=1, started=pb.Started(fingerprint="f"), elements=[elements], status=2, error=error)
        names = list(AsModelConfig().to_dict())
        requests = [convert.request_to_pb(spec) for spec in specs]
        tokens = pb.Tokens(requests=[1, 1], ids=[3, 4], texts=["", "a"], top_counts=[-1, 1], logprobs=[-0.5],
                           top_ids=[4], top_logprobs=[-0.5])
        self.seeds: list[tuple[Any, list[str], Callable[[Any], Any]]] = [
            *((request, [], self._request) for request in requests),
            *((pb.SessionRequest(start=pb.StartRequest(id=1, request=r)), [], self._session) for r in requests),
            (model, names, self._model_config), (pb.InstallModelRequest(config=model), names, self._install),
            (error, [], lambda m: convert.error_to_pb(convert.error_from_pb(m))),
            (elements, [], lambda m: convert.elements_to_pb(convert.elements_from_pb(m))),
            (stat, [], lambda m: convert.stat_to_pb(convert.stat_from_pb(m))),
            (convert.engine_stat_to_pb(AsEngineStat(model_name="m")), [],
             lambda m: convert.engine_stat_to_pb(convert.engine_stat_from_pb(m))),
            (convert.model_info_to_pb(ModelInfo(name="m", eos_token_ids=[1])), [],
             lambda m: convert.model_info_to_pb(convert.model_info_from_pb(m))),
            (pb.SessionResponse(info=pb.ServerInfo(models=convert.models_to_pb([ModelState("m", True, "f", 0)])),
                                events=[event], tokens=tokens), [], self._response),
        ]  # fmt: skip

    def start(self, rng: Random) -> None:
        from allspark_server.engine.engine import Engine
        from allspark_server.rpc.client_stream import ClientStream
        from support.fake_group import FakeGroup

        self.finish()
        self.engine = Engine(group=FakeGroup())
        self.engine.install_model(AsModelConfig(model_name="m", model_path="/x"))
        self.engine.start_model("m")
        self.session = ClientStream(self.engine, lambda session, now: None)

    def finish(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def one(self, rng: Random) -> bool:
        message, texts, handle = rng.choice(self.seeds)
        self.data = mutate.of_message(rng, message, texts)
        try:
            handle(type(message).FromString(self.data))
        except DecodeError:
            return False
        except REFUSALS as error:
            type(error)(*error.args) if not isinstance(error, AllSparkError) else str(error)
            convert.error_from_pb(convert.error_to_pb(error))
            return False
        return True

    @staticmethod
    def _request(message: pb.GenerateRequest) -> None:
        convert.request_to_pb(convert.request_from_pb(message))

    def _session(self, message: pb.SessionRequest) -> None:
        """Handles a session's messages as the service does."""
        action = message.WhichOneof("action")
        if action == "start":
            spec = convert.request_from_pb(message.start.request)
            self.session.register(message.start.id)
            self.session.start(message.start.id, spec)
            events = self.session.take()
            self.session.release(message.start.id)
            for event in events:
                if event.HasField("refused"):
                    error = convert.error_from_pb(event.refused)
                    if isinstance(error, AllSparkError) and error.status == AsStatus.ALLSPARK_UNKNOWN_ERROR:
                        raise Finding(str(error))
        elif action == "stop":
            self.session.stop(message.stop)
        elif action == "release":
            self.session.release(message.release)

    @staticmethod
    def _model_config(message: pb.ModelConfig) -> None:
        convert.model_config_to_pb(convert.model_config_from_pb(message))

    def _install(self, message: pb.InstallModelRequest) -> None:
        config = convert.model_config_from_pb(message.config)
        if config.model_name != "m":
            self.engine.install_model(config)
            self.engine.release_model(config.model_name)

    @staticmethod
    def _response(message: pb.SessionResponse) -> None:
        convert.models_from_pb(message.info.models)
        list(convert.tokens_from_pb(message.tokens))
        for event in message.events:
            for elements in event.elements:
                convert.elements_from_pb(elements)
            convert.as_allspark_error(event.error)
            convert.stat_from_pb(event.stat)
