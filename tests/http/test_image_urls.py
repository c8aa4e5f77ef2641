"""Fetching images that requests name by URL: which hosts and addresses are asked, and what stops an answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from allspark_server.http import image_urls
from allspark_server.http.image_urls import ImageFetcher, is_public
from allspark_server.options import image_hosts
from support.certificates import make_certificate
from support.pictures import encoded, pixels

PICTURE = encoded(pixels(20, 20))


class _Handler(BaseHTTPRequestHandler):
    """Answers by the path, as `images` says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append((self.headers["Host"], self.path))
        assert not {"authorization", "cookie"} & {name.lower() for name in self.headers}
        kind, _, rest = self.path.strip("/").partition("/")
        with contextlib.suppress(OSError):
            getattr(self, f"_{kind}")(rest)

    def _send(self, status=200, body=b"", **headers):
        self.send_response(status)
        for name, value in {"content_length": len(body), **headers}.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def _x(self, _):
        self._send(body=PICTURE, content_type="image/png")

    def _to(self, rest):
        self._send(302, location=f"http://{urllib.parse.unquote(rest)}")

    def _relative(self, rest):
        self._send(308, location=f"../../{rest}")

    def _hops(self, rest):
        self._send(301, location=f"/hops/{int(rest) - 1}" if int(rest) > 1 else "/x")

    def _status(self, rest):
        self._send(int(rest))

    def _long(self, _):
        self._send(content_length=10 ** 12)

    def _endless(self, _):
        self._send(transfer_encoding="chunked", content_length=None)
        while True:
            self.wfile.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")

    def _slow(self, _):
        self._send(content_length=1000)
        for _ in range(100):
            self.wfile.write(b"x")
            time.sleep(0.05)

    def _short(self, _):
        self._send(content_length=100)
        self.close_connection = True

    def _zipped(self, _):
        self._send(body=b"x" * 50, content_encoding="gzip")

    def _garbage(self, _):
        self.wfile.write(b"\0\1\2 no HTTP at all\r\n\r\n")
        self.close_connection = True

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_server(tls: ssl.SSLContext | None = None):
    """A server on 127.0.0.1; yields it. `asked`: hosts and paths of its requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked, server.daemon_threads = [], True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def web(monkeypatch):
    """A server that counts as public under the name images.test; other names resolve to what `names` says."""
    names = {"images.test": ["127.0.0.1"], "other.test": ["127.0.0.1"], "inside.test": ["10.0.0.7"]}
    resolved = []

    async def resolve(host, port):
        resolved.append(host)
        if host not in names:
            raise socket.gaierror
        return names[host]

    monkeypatch.setattr(image_urls, "resolve", resolve)
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    with web_server() as server:
        server.names, server.resolved = names, resolved
        yield server


def fetch(url: str, hosts: str = "*", **options) -> bytes:
    async def run() -> bytes:
        return await ImageFetcher(image_hosts(hosts), **options).fetch(url, asyncio.Semaphore(1))

    return asyncio.run(run())


def refusal(url: str, hosts: str = "*", **options) -> str:
    with pytest.raises(ValueError) as caught:
        fetch(url, hosts, **options)
    return str(caught.value)


def of(server, path: str, host: str = "images.test") -> str:
    return f"http://{host}:{server.server_port}/{path}"


def test_an_image(web):
    assert fetch(of(web, "x")) == fetch(of(web, "x/a%20b ü?q=1 2&r=ü#part"), "images.test") == PICTURE
    assert web.asked == [(f"images.test:{web.server_port}", path) for path in
                         ("/x", "/x/a%20b%20%C3%BC?q=1%202&r=%C3%BC")]


@pytest.mark.parametrize("hosts, host, allowed", [
    ("", "images.test", False), ("*", "images.test", True), ("images.test", "IMAGES.test", True),
    ("images.test", "images.test.", True), ("Images.Test", "images.test", True), ("other.test", "images.test", False),
    ("*.test,example.com", "images.test", True), ("*.images.test", "images.test", False),
    ("*.test", "ximages.test.example", False), ("mages.test", "images.test", False)])
def test_allowed_hosts(web, hosts, host, allowed):
    if allowed:
        assert fetch(of(web, "x", host), hosts) == PICTURE
    else:
        assert "this server fetches no images from" in refusal(of(web, "x", host), hosts)
        assert not web.asked and not web.resolved


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%lo", "fc00::1",
    "ff02::1", "::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1"])
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


def test_public_addresses():
    for address in ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "0", "[::ffff:127.0.0.1]"])
def test_nothing_on_this_machine_is_asked(host):
    """By the system's own resolver, which knows numbers and names in many spellings."""
    with web_server() as server:
        assert any(text in refusal(of(server, "x", host)) for text in ("no public address", "is not known"))
        assert not server.asked


def test_private_addresses_are_refused_after_resolution(web):
    assert refusal(of(web, "x", "inside.test")) == "the host 'inside.test' has no public address"
    assert "'nowhere.test' is not known" in refusal(of(web, "x", "nowhere.test"))
    web.names["both.test"] = ["10.0.0.7", "127.0.0.1"]
    assert fetch(of(web, "x", "both.test")) == PICTURE


def test_a_name_is_resolved_once(web, monkeypatch):
    """The checked address is the one that is used: a second question could have another answer."""
    answers = [["127.0.0.1"], ["169.254.169.254"]]

    async def resolve(host, port):
        return answers.pop(0)

    monkeypatch.setattr(image_urls, "resolve", resolve)
    assert fetch(of(web, "x")) == PICTURE
    assert len(answers) == 1
    assert "has no public address" in refusal(of(web, "x"))


def test_redirects(web):
    port = web.server_port
    for path in ("hops/3", f"to/other.test:{port}/x", "relative/x"):
        assert fetch(of(web, path)) == PICTURE
    assert refusal(of(web, "hops/4")) == "it is redirected more than 3 times"
    for inside in (f"inside.test:{port}/x", "127.0.0.2/x", "[::1]/x", "169.254.169.254/latest/meta-data"):
        web.names |= {"127.0.0.2": ["127.0.0.2"], "::1": ["::1"], "169.254.169.254": ["169.254.169.254"]}
        before = len(web.asked)
        assert "has no public address" in refusal(of(web, f"to/{inside}"))
        assert len(web.asked) == before + 1
    assert "no images from 'other.test'" in refusal(of(web, f"to/other.test:{port}/x"), "images.test")


@pytest.mark.parametrize("url, text", [
    ("", "'' is neither a data URL nor one of http or https"), ("file:///etc/passwd", "neither a data URL nor"),
    ("ftp://images.test/x", "neither a data URL nor"), ("//images.test/x", "neither a data URL nor"),
    ("http://", "neither a data URL nor"), ("http:///x", "neither a data URL nor"), ("http://[::1/x", "is no URL"),
    ("http://images.test:99999/x", "is no URL"), ("http://images.test:x/x", "is no URL"),
    ("http://user:secret@images.test/x", "a user's name"), ("http://" + "x" * 70 + ".test/x", "is no URL"),
    ("http://images..test/x", "is no URL"), ("http://images.test/" + "x" * 9000, "more than 8192 characters"),
    ("gopher://x", "neither"), ("http://images.test\\@inside.test/x", "a user's name"),
    ("http://in side.test/x", "is not known")])
def test_urls_that_are_refused(web, url, text):
    assert text in refusal(url)
    assert not web.asked


@pytest.mark.parametrize("path, text", [
    ("status/404", "answers with the status 404"), ("status/204", "answers with the status 204"),
    ("status/302", "answers with the status 302"), ("long", "more than the 5000 bytes"),
    ("endless", "more than the 5000 bytes"), ("slow", "did not arrive within 0.4 s"), ("short", "cannot be fetched"),
    ("zipped", "compressed"), ("garbage", "cannot be fetched"), ("to/[bad", "")])
def test_answers_that_are_refused(web, monkeypatch, path, text):
    monkeypatch.setattr(image_urls, "SECONDS", 0.4)
    began = time.monotonic()
    assert text in refusal(of(web, path), max_bytes=5000)
    assert time.monotonic() - began < 5


def test_a_server_that_is_gone(web):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert "cannot be fetched" in refusal(f"http://images.test:{free.getsockname()[1]}/x")


def test_https_checks_the_name(web, tmp_path):
    """Of the URL, although the connection goes to an address."""
    files = make_certificate(tmp_path)
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=files["ca"])
    server_side.load_cert_chain(files["cert"], files["key"])
    web.names["localhost"] = ["127.0.0.1"]
    fetcher = ImageFetcher(["*"])

    async def run(host: str) -> bytes:
        return await fetcher.fetch(f"https://{host}:{secure.server_port}/x", asyncio.Semaphore(1))

    with web_server(server_side) as secure:
        with pytest.raises(ValueError, match="cannot be fetched: .*certificate"):
            asyncio.run(run("localhost"))       # this machine does not know the authority
        fetcher._ssl = client_side
        assert asyncio.run(run("localhost")) == PICTURE
        with pytest.raises(ValueError, match="cannot be fetched: .*certificate"):
            asyncio.run(run("images.test"))
