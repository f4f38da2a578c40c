"""The served page: who gets it, and its data while a run goes on."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
from contextlib import suppress

import pytest

pytest.importorskip("pyarrow")

from gradiometer.runs.reader import read_run
from gradiometer.web import PageServer, server
from support.synthetic_run import write_run


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server of a run of 20 steps, which reads the run at every request."""
    monkeypatch.setattr(server, "SHARE", 1e9)
    path = write_run(tmp_path / "run", tensors=4, steps=20, close=False)
    with PageServer(read_run(path)) as found:
        # notices soon that it is to stop
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(served, path, method="GET", **headers):
    """Send a request, and return its status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def test_the_page_is_served_and_may_ask_only_its_own_server(served):
    status, headers, body = ask(served, f"/{served.token}/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")
    assert body.startswith(b"<!doctype html>")
    assert b"connect-src 'self';" in body
    assert served.token.encode() not in body
    assert served.url == f"http://127.0.0.1:{served.server_port}/{served.token}/"


def test_data_are_sent_when_the_run_has_grown(served):
    status, _, body = ask(served, f"/{served.token}/data")
    first = json.loads(body)
    assert status == 200
    assert first["values"]["runs"][0]["range"] == [0, 19]
    assert set(first["matrices"]) == {f"0-grads-{name}" for name in ("norm", "abs_max", "zero_fraction")}
    have = f"/{served.token}/data?have={first['values']['live']['version']}"
    assert ask(served, have)[::2] == (204, b"")
    write_run(served._run.path, tensors=4, steps=10, first=20)
    status, _, body = ask(served, have)
    assert status == 200
    assert json.loads(body)["values"]["runs"][0]["range"] == [0, 29]
    assert json.loads(body)["values"]["live"]["version"] > first["values"]["live"]["version"]


def test_the_run_is_read_in_a_small_share_of_the_time(served, monkeypatch):
    monkeypatch.setattr(server, "SHARE", 1e-9)
    ask(served, f"/{served.token}/")
    write_run(served._run.path, tensors=4, steps=10, first=20)
    have = json.loads(ask(served, f"/{served.token}/data")[2])["values"]["live"]["version"]
    write_run(served._run.path, tensors=4, steps=10, first=30)
    assert ask(served, f"/{served.token}/data?have={have}")[0] == 204


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "ANYTHING"])
@pytest.mark.parametrize(
    "path", ["/", "/data", "/{}x/", "/{:.5}/", "/x/{}/", "/?{}", "/%00/", "/favicon.ico"]
)
def test_without_the_token_everything_is_refused(served, method, path):
    status, headers, body = ask(served, path.format(served.token), method)
    assert status == 403
    assert b"gradiometer serve" in body or method == "HEAD"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        # as a browser sends it after a name of an attacker's site has been resolved to 127.0.0.1
        *[(host, 403) for host in ("attacker.example", "localhost.attacker.example:{}")],
        *[(host, 403) for host in ("127.0.0.1", "127.0.0.1:1", "")],
        ("localhost:{}", 200),
    ],
)
def test_only_this_machine_is_served(served, host, status):
    assert ask(served, f"/{served.token}/", Host=host.format(served.server_port))[0] == status
    assert served.server_address[0] == "127.0.0.1"


def test_two_hosts_or_none_are_refused(served):
    for hosts in ("", f"Host: 127.0.0.1:{served.server_port}\r\nHost: attacker.example\r\n"):
        with socket.create_connection(("127.0.0.1", served.server_port), timeout=60) as connection:
            connection.sendall(f"GET /{served.token}/ HTTP/1.0\r\n{hosts}\r\n".encode())
            assert b" 403 " in connection.makefile("rb").readline()


@pytest.mark.parametrize("path", ["x", "data/", "../etc/passwd", "%2e%2e/", "run.json"])
def test_nothing_but_the_page_and_its_data_is_served(served, path):
    assert ask(served, f"/{served.token}/{path}")[0] == 404


@pytest.mark.parametrize("have", ["-1", "x", "9" * 5000, "%D9%A3", ""])
def test_an_odd_version_gets_all_data(served, have):
    assert ask(served, f"/{served.token}/data?have={have}")[0] == 200


def test_a_run_that_cannot_be_read_is_an_answer_and_not_the_end(served):
    ask(served, f"/{served.token}/")
    info = served._run.path / "run.json"
    kept = info.read_bytes()
    info.write_text("{")
    status, _, body = ask(served, f"/{served.token}/data?have=1")
    assert status == 503
    assert b"run.json" in body
    info.write_bytes(kept)
    assert ask(served, f"/{served.token}/data?have=1")[0] in {200, 204}


def test_nothing_is_printed(served, capfd):
    ask(served, "/")
    ask(served, f"/{served.token}/")
    with socket.create_connection(("127.0.0.1", served.server_port)) as connection:
        connection.sendall(f"GET /{served.token}/ HTTP/1.0\r\n".encode())
    assert capfd.readouterr() == ("", "")


BAD_REQUESTS = {
    "host of the target": ("GET http://[::1/x HTTP/1.1", 400),
    "no address": ("GET http://[x]/ HTTP/1.1", 400),
    "user": ("GET //x@[::1/ HTTP/1.1", 403),
    "percent": ("GET /%/%zz/%ff HTTP/1.1", 403),
    "bytes": ("GET /\xff\x00 HTTP/1.1", 403),
    "colon": ("GET :::// HTTP/1.1", 403),
    "long target": (f"GET /{'x' * 70_000} HTTP/1.1", 414),
    "version": ("GET / HTTP/x.y", 400),
    "old": ("GET /", 403),
    "words": ("GET / / HTTP/1.1", 400),
    "empty method": (" / HTTP/1.1", 400),
    "long header": (f"GET / HTTP/1.1\r\nA: {'x' * 70_000}", 431),
    "headers": ("GET / HTTP/1.1" + "\r\nA: 1" * 200, 431),
    "no header": ("GET / HTTP/1.1\r\nno colon", 403),
    "host": ("GET / HTTP/1.1\r\nHost: [::1\xff", 403),
    "length": ("GET / HTTP/1.1\r\nContent-Length: x", 403),
}


@pytest.mark.parametrize(("request_", "status"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_malformed_request_gets_an_answer(served, request_, status, monkeypatch):
    failed = []
    monkeypatch.setattr(served, "handle_error", lambda *_: failed.append(sys.exc_info()[1]))
    with socket.create_connection(("127.0.0.1", served.server_port), timeout=60) as connection:
        # what is not read makes the system reset the connection, after the answer
        with suppress(ConnectionError):
            connection.sendall(f"{request_}\r\n\r\n".encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    if answer.startswith(b"HTTP/"):
        assert int(answer.split()[1]) == status
    else:  # HTTP/0.9 has no status
        assert (b"Error code: 400" if status == 400 else b"Open the address") in answer
    assert ask(served, f"/{served.token}/")[0] == 200
    assert failed == []
