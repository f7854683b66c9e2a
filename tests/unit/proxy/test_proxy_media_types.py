"""A body is taken only if its head says that it is JSON."""

import aiohttp
import pytest

NOT_JSON = [
    None,
    "text/plain",
    "text/plain; application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/json-seq",
    "application/json, text/plain",
]


@pytest.mark.parametrize("content_type", NOT_JSON)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
async def test_a_body_that_is_not_said_to_be_json_is_not_taken(playing, path, content_type):
    """Of the types that a foreign web page may send without asking first, and of none at all."""
    body = b'{"model": "tiny", "prompt": "hi"}'
    skip = [] if content_type else ["Content-Type"]
    headers = {"Content-Type": content_type} if content_type else {}
    async with (
        aiohttp.ClientSession(playing.proxy.url, skip_auto_headers=skip) as http,
        http.post(path, data=body, headers=headers) as response,
    ):
        assert response.status == 415
        error = (await response.json())["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == ("unsupported_media_type", None)
    assert "Content-Type: application/json" in error["message"]
    assert playing.prefill.legs == []


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", " application/json ;x"]
)
async def test_json_may_be_said_in_other_ways(playing, content_type):
    body = b'{"model": "tiny", "prompt": "hi"}'
    async with playing.proxy.http.post(
        "/v1/completions", data=body, headers={"Content-Type": content_type}
    ) as response:
        assert response.status == 200


async def test_what_has_no_body_may_say_any_type(playing):
    headers = {"Content-Type": "text/plain"}
    async with playing.proxy.http.get("/health", headers=headers) as response:
        assert response.status == 200
