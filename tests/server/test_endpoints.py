"""The small endpoints, keys, CORS, request ids and metrics."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.fake_engine import BOS
from server.live_server import Client, StartServer

USER = [{"role": "user", "content": "hi"}]


async def test_models(start_server: StartServer) -> None:
    client = await start_server(served_model_names=("main", "org/alias"))
    status, models = await client.get("/v1/models")
    assert status == 200 and models["object"] == "list"
    assert [m["id"] for m in models["data"]] == ["main", "org/alias"]
    card = models["data"][0]
    assert {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"} == card.keys()
    assert (card["object"], card["owned_by"], card["root"], card["parent"]) == ("model", "jaxpaged", "fake", None)
    assert card["max_model_len"] == 256 and card["permission"][0]["object"] == "model_permission"
    assert await client.get("/v1/models/org/alias") == (200, models["data"][1])
    status, answer = await client.get("/v1/models/fake")
    assert status == 404 and answer["error"]["message"] == "The model `fake` does not exist."


@pytest.mark.parametrize("name", ["a%2Fb", "a%0Ab", "%7Ba%7D", "%C2%91"])
async def test_odd_names_in_paths_get_an_error_of_the_apis_shape(client: Client, name: str) -> None:
    for path in (f"/v1/models/{name}", f"/v1/responses/{name}"):
        status, answer = await client.get(path)
        assert status == 404 and answer["error"]["type"] == "NotFoundError"
    status, answer = await client.post(f"/v1/responses/{name}/cancel")
    assert status == 404 and answer["error"]["type"] == "NotFoundError"


async def test_answers_carry_the_name_that_was_asked_for(start_server: StartServer) -> None:
    client = await start_server(served_model_names=("main", "alias"))
    assert (await client.complete())["model"] == "main"
    assert (await client.complete(model="alias"))["model"] == "alias"
    await client.error("/v1/completions", {"model": "fake", "prompt": "hi"}, 404)


async def test_health_version_load(client: Client) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        async with client.session.request(method, client.url + path) as response:
            assert response.status == 200 and await response.read() == b""
    assert await client.get("/version") == (200, {"version": version("jaxpaged")})
    assert await client.get("/load") == (200, {"server_load": 0})


async def test_tokenize_and_detokenize(client: Client) -> None:
    status, answer = await client.post("/tokenize", {"prompt": "hi"})
    assert status == 200
    assert answer == {"count": 3, "max_model_len": 256, "tokens": [BOS, 71, 72], "token_strs": None}
    _, answer = await client.post("/tokenize", {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True})
    assert answer == {"count": 2, "max_model_len": 256, "tokens": [71, 72], "token_strs": ["h", "i"]}
    assert await client.post("/detokenize", {"tokens": [71, 72]}) == (200, {"prompt": "hi"})
    assert await client.post("/detokenize", {"tokens": [BOS, 71]}) == (200, {"prompt": "<s>h"})
    assert (await client.post("/tokenize", {"prompt": ""}))[1]["tokens"] == [BOS]


async def test_tokenize_gives_the_prompt_of_a_chat(client: Client) -> None:
    await client.chat()
    _, answer = await client.post("/tokenize", {"messages": USER})
    assert answer["tokens"] == client.engine.all_requests[0].prompt_token_ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "body.prompt"),
        ("/tokenize", {"prompt": [1]}, "body.prompt"),
        ("/tokenize", {"messages": []}, "body.messages"),
        ("/detokenize", {}, "body.tokens"),
        ("/detokenize", {"tokens": [-1]}, "body.tokens.0"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
async def test_bad_tokenizer_requests(client: Client, path: str, body: dict[str, Any], param: str) -> None:
    assert (await client.error(path, body))["param"] == param


async def test_reset_prefix_cache_is_for_development(start_server: StartServer) -> None:
    client = await start_server()
    assert (await client.post("/reset_prefix_cache"))[0] == 404
    client = await start_server(enable_dev_endpoints=True)
    assert (await client.post("/reset_prefix_cache"))[0] == 200
    assert client.engine.cache_resets == 1


async def test_keys(start_server: StartServer) -> None:
    client = await start_server(api_keys=("one", "zwei-ß"))
    for path in ("/health", "/ping", "/version"):
        assert (await client.get(path))[0] == 200
    guarded = ("/v1/models", "/metrics", "/load", "/openapi.json", "/v1/nothing")
    for path in guarded:
        for headers in ({}, {"Authorization": "Bearer two"}, {"Authorization": "one"}, {"Authorization": "Basic one"}):
            status, answer = await client.get(path, headers=headers)
            assert status == 401
            assert answer["error"]["type"] == "AuthenticationError" and answer["error"]["code"] == 401
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        await client.error(path, {"prompt": "hi"}, 401)
    for key in ("one", "zwei-ß"):
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} {key}"}
            assert (await client.get("/v1/models", headers=headers))[0] == 200
    async with client.session.get(client.url + "/v1/models") as response:
        assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_metrics_may_be_public(start_server: StartServer) -> None:
    client = await start_server(api_keys=("one",), metrics_public=True)
    assert (await client.get("/metrics"))[0] == 200
    assert (await client.get("/load"))[0] == 401


async def test_cors(start_server: StartServer) -> None:
    client = await start_server(allowed_origins=("https://a.example",), api_keys=("one",))
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}

    async def preflight(origin: str) -> tuple[int, str | None, str | None]:
        headers = {"Origin": origin, **ask}
        async with client.session.options(client.url + "/v1/completions", headers=headers) as r:
            allow = "Access-Control-Allow-"
            return r.status, r.headers.get(allow + "Origin"), r.headers.get(allow + "Headers")

    assert await preflight("https://a.example") == (200, "https://a.example", "authorization,content-type")
    assert await preflight("https://b.example") == (403, None, None)
    headers = {"Origin": "https://a.example", "Authorization": "Bearer one"}
    for body in ({"prompt": "hi"}, {"prompt": "hi", "stream": True}, {}):
        async with client.session.post(client.url + "/v1/completions", json=body, headers=headers) as r:
            assert r.headers["Access-Control-Allow-Origin"] == "https://a.example" and r.headers["Vary"] == "Origin"


async def test_no_cors_by_default_and_any_origin_where_wanted(start_server: StartServer) -> None:
    headers = {"Origin": "https://a.example"}
    for origins, expected in (((), None), (("*",), "*")):
        client = await start_server(allowed_origins=origins)
        async with client.session.get(client.url + "/version", headers=headers) as r:
            assert r.headers.get("Access-Control-Allow-Origin") == expected


async def test_request_id_headers(start_server: StartServer) -> None:
    for enabled in (False, True):
        client = await start_server(enable_request_id_headers=enabled)
        for body in ({"prompt": "hi"}, {"prompt": "hi", "stream": True}):
            async with client.session.post(
                client.url + "/v1/completions", json=body, headers={"X-Request-Id": "mine"}
            ) as r:
                assert r.headers.get("X-Request-Id") == ("mine" if enabled else None)
                assert "cmpl-mine" in await r.text()
        async with client.session.get(client.url + "/version") as r:
            assert bool(r.headers.get("X-Request-Id")) == enabled


async def test_odd_bytes_in_headers_do_no_harm(start_server: StartServer) -> None:
    client = await start_server(enable_request_id_headers=True, allowed_origins=("*",), api_keys=("k",))
    head = b"Host: x\r\nConnection: close\r\nOrigin: \xff\r\nX-Request-Id: a\xff\xc3\xa9b\r\n"
    body = b'{"prompt": "hi"}'
    post = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    for first, rest, status in (
        (b"POST /v1/completions", b"Authorization: Bearer k\r\n" + post, b"200"),
        (b"POST /v1/completions", b"Authorization: Bearer k\r\nX-Vllm-Priority: \xff\r\n" + post, b"400"),
        (b"GET /v1/models", b"Authorization: Bearer \xff\r\n\r\n", b"401"),
        (b"OPTIONS /x", b"Access-Control-Request-Method: GET\r\nAccess-Control-Request-Headers: \xff\r\n\r\n", b"200"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(first + b" HTTP/1.1\r\n" + head + rest)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 " + status) and b"X-Request-Id: ab\r\n" in answer, answer


async def samples(client: Client) -> dict[str, dict[tuple[str, ...], float]]:
    """Values of each series, by name and by the labels besides model and engine."""
    status, text = await client.get("/metrics")
    assert status == 200
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            labels = dict(s.labels)
            if ":" in s.name:
                assert (labels.pop("model_name"), labels.pop("engine")) == ("fake", "0")
            values.setdefault(s.name, {})[tuple(labels.values())] = s.value
    return values


async def test_metrics(client: Client) -> None:
    await client.complete(max_tokens=3, n=2)
    await client.events("/v1/completions", prompt="hi", max_tokens=4)
    values = await samples(client)
    for prefix in ("jaxpaged:", "vllm:"):
        expected = {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
            "prompt_tokens_total": 6,
            "prompt_tokens_cached_total": 0,
            "generation_tokens_total": 10,
            "num_preemptions_total": 0,
            "prefix_cache_queries_total": 6,
            "prefix_cache_hits_total": 0,
            "time_to_first_token_seconds_count": 2,
            "inter_token_latency_seconds_count": 3,  # of the streamed one
            "request_time_per_output_token_seconds_count": 2,
            "e2e_request_latency_seconds_count": 2,
            "request_queue_time_seconds_count": 2,
            "request_inference_time_seconds_count": 2,
            "request_prefill_time_seconds_count": 2,
            "request_decode_time_seconds_count": 2,
            "request_prompt_tokens_sum": 6,
            "request_generation_tokens_sum": 10,
            "request_params_n_sum": 3,
            "request_params_max_tokens_sum": 7,
            "iteration_tokens_total_sum": 16,
            "iteration_tokens_total_count": 7,
        }
        assert {name: values[prefix + name][()] for name in expected} == expected
        assert values[prefix + "request_success_total"] == {
            ("stop",): 0, ("length",): 3, ("abort",): 0, ("error",): 0,
        }  # fmt: skip
        [info] = values[prefix + "cache_config_info"]
        assert sorted(info) == sorted(("16", "auto", "129", "0", "True"))
    assert "process_resident_memory_bytes" in values


async def test_vllm_names_can_be_turned_off(start_server: StartServer) -> None:
    client = await start_server(vllm_metric_aliases=False)
    names = await samples(client)
    assert "jaxpaged:num_requests_running" in names and not any(n.startswith("vllm:") for n in names)


async def test_openapi_document(client: Client) -> None:
    status, document = await client.get("/openapi.json")
    assert status == 200 and document["openapi"] == "3.1.0"
    assert document["paths"].keys() == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/health", "/ping", "/version",
        "/metrics", "/load", "/tokenize", "/detokenize", "/openapi.json", "/v1/responses",
        "/v1/embeddings",
        "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel",
    }  # fmt: skip
    assert document["paths"]["/ping"].keys() == {"get", "post"}
    schemas = document["components"]["schemas"]

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if "$ref" in node else []
            return own + [r for value in node.values() for r in references(value)]
        return [r for value in node for r in references(value)] if isinstance(node, list) else []

    assert references(document)
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    fields = schemas["CompletionRequest"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    assert all("description" in f or name in ("model", "prompt") for name, f in fields.items())
