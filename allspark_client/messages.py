"""Makes protobuf message classes of a file's descriptor by protobuf's public interface.

Code that protoc generates needs a protobuf at least as new as protoc's own. A client must not demand that: its program
may require an older one.
"""
from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def messages_of(file: bytes) -> dict[str, Any]:
    """The names that a generated module defines: a file's message classes, enumeration values and DESCRIPTOR.

    `file`: a serialized FileDescriptorProto without imports.
    """
    name = descriptor_pb2.FileDescriptorProto.FromString(file).name
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file)
    descriptor = pool.FindFileByName(name)
    names: dict[str, Any] = {"DESCRIPTOR": descriptor}
    for message in descriptor.message_types_by_name.values():
        names[message.name] = message_factory.GetMessageClass(message)
    for enumeration in descriptor.enum_types_by_name.values():
        names.update((value.name, value.number) for value in enumeration.values)
    return names
