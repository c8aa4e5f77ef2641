"""Self-signed certificates for localhost."""
from __future__ import annotations

import os
import ssl
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, days: int = 2) -> dict[str, str]:
    """Makes cert.pem and key.pem, or replaces those that exist, the certificate first. Returns the fields of a
    TlsConfig.
    """
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
             str(days), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout",
             f"{key}.new", "-out", f"{cert}.new"]
    try:
        subprocess.run(words, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl command")
    for file in (cert, key):
        os.replace(f"{file}.new", file)
    return {"cert": str(cert), "key": str(key), "ca": str(cert)}


def shown_at(address: str) -> str:
    """The certificate of the server at "host:port", as PEM."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))
