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


def make_signed_certificate(folder: Path) -> dict[str, str]:
    """As make_certificate, but an authority of its own (ca.pem) has signed it: some TLS libraries accept no certificate
    that is its own authority.
    """
    authority = folder / "authority"
    authority.mkdir()
    ca = make_certificate(authority)
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
             "2", "-subj", "/CN=server", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext",
             "basicConstraints=critical,CA:FALSE", "-CA", ca["cert"], "-CAkey", ca["key"], "-keyout", str(key), "-out",
             str(cert)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"openssl cannot sign a certificate (3.0 can): {done.stderr.strip()[-200:]}")
    return {"cert": str(cert), "key": str(key), "ca": ca["cert"]}


def shown_at(address: str) -> str:
    """The certificate of the server at "host:port", as PEM."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)))
