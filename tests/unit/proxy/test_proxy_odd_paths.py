"""Paths that mean a file elsewhere: nothing is opened here, and a model is a name."""

import pytest
from raw_http import RawClient, get, post

from neuron_di_proxy.service import Service

PATHS = [
    "/../../etc/passwd",
    "/v1/models/../../../etc/passwd",
    "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/v1/models/..%252f..%252fetc%252fpasswd",
    "/v1/models/%00",
    "/v1/models//etc/passwd",
    "/v1/receipts/..%2f..%2fetc%2fpasswd",
    "/v1/receipts/%00",
    "/static/app.py",
    "//etc/passwd",
]


@pytest.mark.parametrize("path", PATHS)
async def test_b24_a_path_opens_no_file(playing, path):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(get(path))
        response = await raw.response()
        assert response.status == 404
        assert set(response.error) == {"message", "type", "param", "code"}
        assert b"root:" not in response.body


@pytest.mark.parametrize("model", ["../../etc/passwd", "/etc/passwd", "tiny\x00", "tiny/../tiny"])
@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize"])
async def test_b24_a_model_is_a_name(playing, route, model):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(post(route, {"model": model, "prompt": "hi"}))
        response = await raw.response()
        assert (response.status, response.error["code"]) == (404, "model_not_found")


LARGE = {"model": "tiny", "prompt": "x" * 100_000}
WRITTEN = ["/v1/completions", "//v1/completions", "/v1/%63ompletions", "http://b/v1/completions"]


@pytest.mark.parametrize("path", WRITTEN)
async def test_however_a_route_is_written_its_limits_are_the_same(playing, path):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(post(path, LARGE))
        assert (await raw.response()).status == 200


@pytest.mark.parametrize("path", WRITTEN)
async def test_however_a_route_is_written_it_is_admitted_before_its_body_is_there(
    playing, path, monkeypatch
):
    opened, take = [], Service.open

    def note(self, endpoint, headers):
        opened.append(endpoint)
        return take(self, endpoint, headers)

    monkeypatch.setattr(Service, "open", note)
    request = post(path, LARGE, "Expect: 100-continue")
    begin = request.index(b"\r\n\r\n") + 4
    async with RawClient(playing.proxy.address) as raw:
        raw.send(request[:begin])
        status_line, _ = await raw.read_head()
        assert (status_line.split()[1], opened) == ("100", ["completions"])
        raw.send(request[begin:])
        assert (await raw.response()).status == 200
        assert len(opened) == 1
