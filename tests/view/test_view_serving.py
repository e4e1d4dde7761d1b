"""``view --serve``: one page, to those who know its address, and to no site that the browser has open."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import onnx_ir as ir
import pytest
import torch

import htp_export
from htp_export.capabilities.view import tensor_values
from htp_export.capabilities.view.page.document import served
from htp_export.capabilities.view.page.server import PageServer
from htp_export.capabilities.view.tensor_values import TensorValues
from htp_export.command.main import main
from htp_export.model.tagged import load
from tests import handmade
from tests.chromium import needs_chromium

PAGE = "<!doctype html><title>Schöne Netze</title>"


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer() as made:
        running = threading.Thread(target=made.run, args=(PAGE,))
        running.start()
        yield made
        made.shutdown()
        running.join()


def ask(
    server: PageServer, path: str | None = None, method: str = "GET", **headers: str
) -> http.client.HTTPResponse:
    """The answer to one request; its body is read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest(
        method, server.path if path is None else path, skip_host="Host" in headers
    )
    for name, value in headers.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def raw(server: PageServer, request: bytes) -> bytes:
    """All bytes of the answer to bytes, which need not be HTTP."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_the_page_is_served_at_its_address_alone(server):
    assert server.url == f"http://127.0.0.1:{server.port}{server.path}"
    answer = ask(server)
    assert (answer.status, answer.body.decode()) == (200, PAGE)
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert int(answer.headers["Content-Length"]) == len(PAGE.encode())
    assert ask(server, method="HEAD").headers["Content-Length"] == answer.headers["Content-Length"]
    assert ask(server, method="HEAD").body == b""


def test_addresses_are_not_to_be_guessed():
    with PageServer() as one, PageServer() as other:
        assert len(one.path) >= 43  # 256 bits
        assert one.path != other.path
        assert one.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    [
        "/", "/favicon.ico", "/index.html", "/api/v1/read_text_file?path=/etc/passwd", "/{token}", "/{shortened}/",
        "/api/v1/load_graphs_json?graph_index=0", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/{swapped}/",
        "/{token}/../etc/passwd", "/{token}/etc/passwd", "/{token}/?path=/etc/passwd", "/Ünicode/",
        "http://127.0.0.1/{token}/",
    ],
)  # fmt: skip
def test_other_paths_have_no_answer(server, path):
    token = server.path.strip("/")
    asked = path.format(token=token, shortened=token[:-1], swapped=token.swapcase())
    answer = raw(server, f"GET {asked} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.0 404 ")
    assert answer.endswith(b"Content-Length: 0\r\n\r\n")


# DNS rebinding: the browser names the attacker's host.
HOSTS = (
    "evil.example",
    "evil.example:{port}",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.0.0.1.evil.example:{port}",
    "",
)
ORIGINS = (
    "http://evil.example",
    "null",
    "https://127.0.0.1:{port}",
    "http://127.0.0.1:1",
    "http://127.0.0.1",
)


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [*(("Host", host, 421) for host in HOSTS), *(("Origin", origin, 403) for origin in ORIGINS)],
)
def test_other_hosts_and_origins_have_no_answer(server, header, value, status):
    answer = ask(server, **{header: value.format(port=server.port)})
    assert (answer.status, answer.body) == (status, b"")


def test_a_request_names_one_host(server):
    hosts = f"Host: evil.example\r\nHost: 127.0.0.1:{server.port}\r\n".encode()
    assert raw(
        server, b"GET " + server.path.encode() + b" HTTP/1.1\r\n" + hosts + b"\r\n"
    ).startswith(b"HTTP/1.0 421")
    # HTTP/0.9 has no host
    assert PAGE.encode() not in raw(server, b"GET " + server.path.encode() + b"\r\n\r\n")


def test_localhost_is_this_host_too(server):
    assert ask(server, Host=f"localhost:{server.port}").status == 200


def test_its_own_origin_has_an_answer_that_other_sites_may_not_read_or_frame(server):
    answer = ask(server, Origin=f"http://127.0.0.1:{server.port}")
    assert answer.status == 200
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Server"] == "htp-export"


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"]
)
def test_nothing_can_be_sent(server, method):
    answer = ask(server, method=method)
    assert (answer.status, answer.body, answer.headers["Allow"]) == (405, b"", "GET, HEAD")


@pytest.mark.parametrize(
    "request_", [b"", b"\x00\xff\r\n\r\n", b"SPAM / HTTP/1.1\r\n\r\n", b"GET " + b"/" * 70000]
)
def test_what_is_no_request_does_not_end_it(server, request_):
    assert PAGE.encode() not in raw(server, request_)
    assert ask(server).status == 200


def test_a_client_that_says_nothing_keeps_no_other_waiting(server):
    with socket.create_connection(("127.0.0.1", server.port)):
        assert ask(server).status == 200


def held(server: PageServer, count: int, begun: bytes) -> list[socket.socket]:
    """Connections that begin a request and do not end it."""
    made = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(count)]
    for connection in made:
        connection.sendall(begun)
    return made


def is_ended(connection: socket.socket) -> bool:
    """Whether the other side ends a connection without an answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("begun", [b"", b"GET / HT"])
def test_half_open_connections_take_few_threads_and_keep_no_other_waiting(server, begun):
    before = threading.active_count()
    connections = held(server, 100, begun)
    began = time.monotonic()
    assert ask(server).status == 200
    assert time.monotonic() - began < 5
    assert threading.active_count() - before <= 32
    assert all(map(is_ended, connections[:50]))  # the oldest ones
    for connection in connections:
        connection.close()
    assert ask(server).status == 200


def test_a_request_that_does_not_end_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr("htp_export.capabilities.view.page.server._LONGEST_REQUEST", 0.2)
    [connection] = held(server, 1, b"GET / HTTP/1.1\r\n")
    began = time.monotonic()
    assert is_ended(connection)
    assert 0.1 < time.monotonic() - began < 10
    connection.close()


def test_a_page_that_is_read_slowly_is_sent_to_its_end(monkeypatch):
    monkeypatch.setattr("htp_export.capabilities.view.page.server._LONGEST_REQUEST", 0.2)
    page = "x" * (16 << 20)  # more than the buffers of two sockets hold
    with PageServer() as slow:
        threading.Thread(target=slow.run, args=(page,), daemon=True).start()
        request = f"GET {slow.path} HTTP/1.1\r\nHost: 127.0.0.1:{slow.port}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", slow.port), timeout=30) as connection:
            connection.sendall(request.encode())
            head = connection.recv(10)
            time.sleep(1.5)
            rest = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        slow.shutdown()
    assert head == b"HTTP/1.0 2"
    assert len(rest) > len(page)


def test_a_port_that_is_taken_is_said_in_one_line(tmp_path, capsys):
    ir.save(handmade.encoder(), tmp_path / "net.onnx")
    with PageServer() as server:
        assert (
            main(["view", str(tmp_path / "net.onnx"), "--serve", "--port", str(server.port)]) == 2
        )
    said = capsys.readouterr().err
    assert said.startswith(f"htp-export: error: cannot listen on port {server.port} of 127.0.0.1: ")
    assert said.count("\n") == 1


def test_serving_writes_no_file(tmp_path, capsys):
    ir.save(handmade.encoder(), tmp_path / "net.onnx")
    assert (
        main(["view", str(tmp_path / "net.onnx"), "--serve", "-o", str(tmp_path / "net.html")]) == 2
    )
    assert "--output has no effect" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT for another process")
def test_the_page_of_a_model_is_served_from_memory_until_ctrl_c(tmp_path):
    file = tmp_path / "net.onnx"
    ir.save(handmade.encoder(), file)
    command = [
        sys.executable,
        "-m",
        "htp_export",
        "view",
        str(file),
        "--serve",
        "--no-explorer",
        "--json",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = "".join(iter(process.stdout.readline, "}\n"))
        url = json.loads(f"{said}}}")["url"]
        file.write_bytes(b"another file")
        address, path = url.removeprefix("http://").split("/", 1)
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request("GET", f"/{path}")
        page = connection.getresponse().read().decode()
        connection.close()
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=30)
    assert "node_fc0" in page
    assert (process.returncode, rest) == (0, ("", ""))
    assert [each.name for each in tmp_path.iterdir()] == ["net.onnx"]


# --- values of tensors


@pytest.fixture(scope="module")
def with_values() -> Iterator[PageServer]:
    x = handmade.value("x")
    odd = "weight/../%2e?name=ö&b"
    weights = [handmade.weight("fc.weight"), handmade.weight(odd)]
    node = handmade.tagged_node("MatMul", [x, weights[0]], "fc", "y")
    model = handmade.model(
        [x], [node], weights, [handmade.ModuleInfo("", "Net"), handmade.ModuleInfo("fc", "Linear")]
    )
    model.graph.initializers["text"] = ir.Value(
        name="text", const_value=ir.tensor(["a", "b"], name="text")
    )
    with PageServer() as made:
        running = threading.Thread(target=made.run, args=(PAGE, TensorValues(load(model))))
        running.start()
        yield made
        made.shutdown()
        running.join()


def values_of(server: PageServer, name: str) -> Any:
    answer = ask(server, f"{server.path}tensor?name={quote(name, safe='')}")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    return json.loads(answer.body)


def test_the_values_of_a_stored_tensor_are_those_of_the_file(with_values):
    expected = handmade.weight("fc.weight").const_value.numpy()
    found = values_of(with_values, "fc.weight")
    assert (found["type"], found["shape"]) == ("float32", [4, 4])
    assert found["values"] == expected.reshape(-1).tolist()
    counts, edges = np.histogram(expected.astype(np.float64), bins=48)
    assert found["counts"] == counts.tolist()
    assert found["edges"] == pytest.approx(edges.tolist(), rel=1e-5)
    assert values_of(with_values, "weight/../%2e?name=ö&b")["shape"] == [4, 4]
    assert values_of(with_values, "text")["problem"] == "its elements are not real numbers"


@pytest.mark.parametrize(
    "query",
    [
        "tensor?name=x", "tensor?name=", "tensor?name=../../etc/passwd", "tensor?name=/etc/passwd", "tensor",
        "tensor?path=fc.weight", "values?name=fc.weight", "tensor/../tensor?name=fc.weight", "?name=fc.weight",
    ],
)  # fmt: skip
def test_nothing_but_stored_tensors_has_values(with_values, query):
    assert ask(with_values, with_values.path + query).status == 404


def test_values_are_for_those_who_know_the_address(with_values):
    query = "tensor?name=fc.weight"
    port = with_values.port
    assert ask(with_values, f"/{query}").status == 404
    assert ask(with_values, with_values.path + query, Host="attacker.example").status == 421
    origin = {"Origin": "http://attacker.example"}
    assert ask(with_values, with_values.path + query, **origin).status == 403
    own = {"Origin": f"http://127.0.0.1:{port}"}
    assert ask(with_values, with_values.path + query, Host=f"127.0.0.1:{port}", **own).status == 200
    assert ask(with_values, with_values.path + query, "POST").status == 405


def test_values_that_json_cannot_express_and_large_tensors(monkeypatch):
    array = np.array([np.nan, np.inf, -1.0, 3.0], np.float32)
    value = ir.Value(name="w", const_value=ir.tensor(array, name="w"))
    x = handmade.value("x")
    model = handmade.model([x], [handmade.tagged_node("Relu", [x], "", "y")], [value], [])
    values = TensorValues(load(model))
    found = values("w")
    assert found is not None
    assert (found["values"], found["not_finite"]) == (["NaN", "inf", -1.0, 3.0], 2)
    assert sum(found["counts"]) == 2
    monkeypatch.setattr(tensor_values, "MOST_BYTES", 8)
    assert values("w") == {
        "name": "w",
        "type": "float32",
        "shape": [4],
        "problem": "it has more than 8 bytes",
    }


@pytest.mark.long
@needs_chromium
def test_the_page_shows_the_values_of_a_tensor_when_it_is_asked_to(page, with_values, tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 3)).eval()
    htp_export.export(net, (torch.randn(2, 8),), tmp_path / "net.onnx", verbose=False)
    html = htp_export.view(tmp_path / "net.onnx", explorer=False).html
    with PageServer() as made:
        values = TensorValues(load(tmp_path / "net.onnx"))
        running = threading.Thread(target=made.run, args=(served(html), values))
        running.start()
        try:
            page.open_address(made.url)
            page.wait("document.documentElement.dataset.ready")
            page.run("htp.select(htp.byPath.get('0'))")
            button = (
                "[...document.querySelectorAll('#detail .tensor')]"
                ".find((it) => it.textContent.includes('0.weight')).querySelector('button')"
            )
            page.run(f"{button}.click()")
            page.wait("document.querySelector('#detail .bars')")
            assert page.run("document.querySelectorAll('#detail .bars i').length") == 48
            first = f"{net[0].weight[0, 0].item():.3g}"
            assert first.rstrip("0") in page.run("document.getElementById('detail').innerText")
        finally:
            made.shutdown()
            running.join()
