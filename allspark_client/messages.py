"""Protobuf message classes made of a file's descriptor, by protobuf's public interface alone: code that protoc generates
runs only with a protobuf at least as new as protoc's own, and a client lives beside others' requirements.
"""
from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def messages_of(file: bytes) -> dict[str, Any]:
    """The classes of a file's messages and the numbers of its enumerations' values, by name, and its DESCRIPTOR.
    file: a serialized FileDescriptorProto without imports.
    """
    name = descriptor_pb2.FileDescriptorProto.FromString(file).name
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file)
    descriptor = pool.FindFileByName(name)
    found: dict[str, Any] = {"DESCRIPTOR": descriptor}
    for message in descriptor.message_types_by_name.values():
        found[message.name] = message_factory.GetMessageClass(message)
    for enumeration in descriptor.enum_types_by_name.values():
        found.update((value.name, value.number) for value in enumeration.values)
    return found
