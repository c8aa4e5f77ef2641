"""Limits and gRPC options of rank 0's service."""
from __future__ import annotations

#: A silent client is noticed after a ping interval and a ping timeout: 12 s, within the 15 s that are promised.
PING_INTERVAL_SECONDS, PING_TIMEOUT_SECONDS = 5, 7
#: the default limit of a client's message, bytes: the ids of a prompt of four million tokens, or 128 bytes of text for
#: each of 128k tokens
MAX_MESSAGE = 16 << 20
_MAX_METADATA = 64 << 10
SERVER_OPTIONS = [
    ("grpc.keepalive_time_ms", PING_INTERVAL_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    # The timeout of bandwidth probes, which replace keepalive pings: without it no silent client is noticed.
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),   # a second server on the port is an error; it must not share connections
    ("grpc.max_concurrent_streams", 256),       # per connection; all requests of a session share one stream
    ("grpc.max_connection_idle_ms", 600_000),   # for connections without calls; this project's clients always have one
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", _MAX_METADATA),
    ("grpc.absolute_max_metadata_size", 2 * _MAX_METADATA),
]
