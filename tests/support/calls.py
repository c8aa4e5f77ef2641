"""Calls of a group by the bytes of their messages: as a hostile client makes them, and with the token of a role."""

from __future__ import annotations

import grpc

from allspark_client import AsModelConfig, convert
from allspark_client._proto import allspark_pb2 as pb
from allspark_server.access import Role

TOKENS = {"see": Role.READ, "ask": Role.GENERATE, "rule": Role.ADMIN}
ADMIN_CALLS = {
    "InstallModel": pb.InstallModelRequest(config=convert.model_config_to_pb(AsModelConfig("new", "/none"))),
    "StartModel": pb.ModelRequest(model="m"), "StopModel": pb.ModelRequest(model="x"),
    "ReleaseModel": pb.ModelRequest(model="x"), "GetPrefixes": pb.PrefixesRequest(),
    "Prefill": pb.PrefillRequest(), "ReadSpans": pb.ReadSpansRequest(model="m"),
    "UnloadModel": pb.ModelRequest(model="x"),
    "GetFileInformation": pb.FileInformationRequest(),
    "GetOpProfiling": pb.ModelRequest(model="m"), "LoadLora": pb.LoraRequest(), "UnloadLora": pb.LoraRequest(),
    "UnloadDeviceMem": pb.ModelRequest(), "LoadDeviceMem": pb.ModelRequest(),
    "ResetPrefixCache": pb.ModelRequest(),
}  # fmt: skip
CALLS_OF_ALL = {"GetServerInfo": pb.ServerInfoRequest(), "GetStat": pb.ModelRequest(model="m"),
                "GetModelInfo": pb.ModelRequest(model="m")}  # fmt: skip
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def call(channel, method, data: bytes, token=None, timeout=10.0):
    """Makes a call with one message; returns the first answer's bytes or the status code."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    path = method if method.startswith("/") else f"/allspark.Allspark/{method}"
    try:
        return next(iter(channel.unary_stream(path)(data, metadata=metadata, timeout=timeout)))
    except grpc.RpcError as error:
        return error.code()
