"""One request and its sample: against a real server, with a stand-in for vLLM's side that stores what it is asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.ingest_client import IngestClient
from support.server import ServerProcess
from support.synthetic import SyntheticSample

from slotstream.client import CaptureStream, Client, ConfigError, SampleFailed, SampleNotFound, capture, connect
from slotstream.wire.errors import BadSampleId, StagingFull

Store = Callable[[dict[str, Any], dict[str, Any]], Any]


class Engine:
    """What `capture` uses of an OpenAI client. `store` gets the capture's parameters and the request, and answers it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.completions = SimpleNamespace(create=self._method("completions"))
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._method("chat")))
        self.responses = SimpleNamespace(create=self._method("responses"))

    def _method(self, name: str) -> Callable[..., Any]:
        def create(**request: Any) -> Any:
            self.asked.append((name, request))
            return self._store(request["extra_body"]["kv_transfer_params"]["slotstream"], request)

        return create


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connect(server.address) as connected:
        yield connected


@pytest.fixture
def engine(ingest: IngestClient, namespace: str) -> Engine:
    """Stores each prompt, and each of `n` sequences where output rows are wanted; says so in its answer."""

    def store(params: dict[str, Any], request: dict[str, Any]) -> Any:
        space, name = params.get("namespace", namespace), params["sample_id"]
        rows = 3 + len(str(request.get("prompt")))
        if params.get("include_output_tokens") and request.get("n", 1) > 1:
            for at in range(request["n"]):
                own = name if at == 0 else f"{name}.{at}"
                metadata = {"sequence_index": str(at)}
                ingest.store(SyntheticSample(own, namespace=space, num_tokens=5 + at, metadata=metadata))
        else:
            ingest.store(SyntheticSample(name, namespace=space, num_tokens=rows, tags=params.get("tags", {})))
        said = {"slotstream": {"sample_id": name, "namespace": space}}
        if request.get("stream"):
            return iter([SimpleNamespace(text="a"), SimpleNamespace(text="b", kv_transfer_params=said)])
        return SimpleNamespace(text="text", kv_transfer_params=said)

    return Engine(store)


def test_a_request_gives_its_response_and_its_sample(client: Client, engine: Engine) -> None:
    body = {"top_k": 1, "kv_transfer_params": {"other": 1, "slotstream": {"tags": {"a": "b"}}}}
    response, sample = capture(engine, client=client, model="m", prompt="four", max_tokens=2, extra_body=body)
    assert response.text == "text"
    assert sample.token_ids.shape == (7,)
    assert sample.tags == {"a": "b"}
    name, request = engine.asked[0]
    assert (name, request["model"], request["max_tokens"], request["extra_body"]["top_k"]) == ("completions", "m", 2, 1)
    assert request["extra_body"]["kv_transfer_params"]["other"] == 1
    assert sample.sample_id == request["extra_body"]["kv_transfer_params"]["slotstream"]["sample_id"]
    assert body == {"top_k": 1, "kv_transfer_params": {"other": 1, "slotstream": {"tags": {"a": "b"}}}}  # The caller's own.
    _, again = capture(engine, client=client, model="m", prompt="four")
    assert again.sample_id != sample.sample_id


def test_chats_and_responses_and_a_chosen_id(client: Client, engine: Engine, namespace: str) -> None:
    requests: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "x"}]},
        "responses": {"input": "x"},
    }
    for kind, request in requests.items():
        params = {"sample_id": f"my-{kind}", "namespace": f"{namespace}-b"}
        _, sample = capture(engine, client=client, slotstream=params, model="m", **request)
        assert (sample.sample_id, sample.namespace, engine.asked[-1][0]) == (f"my-{kind}", f"{namespace}-b", kind)


def test_sequences_come_in_the_order_of_the_choices(client: Client, engine: Engine) -> None:
    _, samples = capture(engine, client=client, slotstream={"include_output_tokens": True}, model="m", prompt="x", n=3)
    assert [len(sample.token_ids) for sample in samples] == [5, 6, 7]
    _, shared = capture(engine, client=client, model="m", prompt="x", n=3)
    assert shared.token_ids.shape == (4,)


def test_a_list_of_prompts_is_a_request_each(client: Client, engine: Engine) -> None:
    responses, samples = capture(engine, client=client, slotstream={"sample_id": "many"}, model="m", prompt=["a", "bcd"])
    assert [sample.sample_id for sample in samples] == ["many", "many.p1"]
    assert [len(sample.token_ids) for sample in samples] == [4, 6]
    assert len(responses) == 2
    assert [request["prompt"] for _, request in engine.asked] == ["a", "bcd"]
    responses, samples = capture(engine, client=client, model="m", prompt=[[1, 2], [3]])
    assert [request["prompt"] for _, request in engine.asked[2:]] == [[1, 2], [3]]
    responses, samples = capture(engine, client=client, model="m", prompt=["only one"])
    assert (len(responses), len(samples)) == (1, 1)
    _, sample = capture(engine, client=client, model="m", prompt=[1, 2])  # Token ids: one prompt.
    assert engine.asked[-1][1]["prompt"] == [1, 2]
    assert sample.token_ids.shape == (9,)


def test_a_stream_gives_its_events_and_then_the_sample(client: Client, engine: Engine) -> None:
    stream = capture(engine, client=client, model="m", prompt="x", stream=True)
    assert isinstance(stream, CaptureStream)
    assert next(stream).text == "a"
    sample = stream.sample()
    assert not isinstance(sample, list)
    assert sample.sample_id == stream.sample_id
    assert list(stream) == []
    with capture(engine, client=client, model="m", prompt="x", stream=True) as events:
        assert [event.text for event in events] == ["a", "b"]


def text_of(error: Any) -> Any:
    """Of what an error keeps."""
    kept = error.response
    return [response.text for response in kept] if isinstance(kept, list) else kept.text


def test_an_error_after_the_text_keeps_it(client: Client, ingest: IngestClient, namespace: str) -> None:
    def nothing(params: dict[str, Any], request: dict[str, Any]) -> Any:
        return SimpleNamespace(text="kept")

    with pytest.raises(SampleNotFound) as caught:
        capture(Engine(nothing), client=client, model="m", prompt="x", wait_s=0)
    assert text_of(caught.value) == "kept"

    def failed(params: dict[str, Any], request: dict[str, Any]) -> Any:
        ingest.fail(SyntheticSample(params["sample_id"], namespace=namespace))
        return SimpleNamespace(text=request["prompt"], kv_transfer_params={"slotstream": {"namespace": namespace}})

    with pytest.raises(SampleFailed) as several:
        capture(Engine(failed), client=client, model="m", prompt=["x", "y"])
    assert text_of(several.value) == ["x", "y"]

    def refused(params: dict[str, Any], request: dict[str, Any]) -> Any:
        error = {"code": "STAGING_FULL", "message": "no room"}
        return SimpleNamespace(text="kept", kv_transfer_params={"slotstream": {"error": error}})

    with pytest.raises(StagingFull, match="no room") as told:
        capture(Engine(refused), client=client, model="m", prompt="x")
    assert text_of(told.value) == "kept"


def test_the_answer_names_the_server(
    server: ServerProcess, engine: Engine, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    monkeypatch.setenv("SLOTSTREAM_SERVER", server.address)
    _, sample = capture(engine, model="m", prompt="x")
    assert sample.namespace == namespace
    monkeypatch.delenv("SLOTSTREAM_SERVER")
    told = Engine(lambda params, request: _with_server(engine._store(params, request), server.address))
    _, sample = capture(told, model="m", prompt="x")
    assert sample.namespace == namespace


def test_an_answer_that_names_several_servers(
    server: ServerProcess, engine: Engine, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    monkeypatch.delenv("SLOTSTREAM_SERVER", raising=False)
    servers = f"unix:/no/such/socket,{server.address}"
    told = Engine(lambda params, request: _with_server(engine._store(params, request), servers))
    for _ in range(4):  # Whichever is asked first.
        _, sample = capture(told, model="m", prompt="x")
        assert sample.namespace == namespace
    elsewhere = Engine(lambda params, request: _with_server(_said(params, namespace), servers))
    with pytest.raises(SampleNotFound) as caught:
        capture(elsewhere, model="m", prompt="x", wait_s=0.0)
    assert f"the engine sends to one of {servers}, and one of {servers} was asked" in str(caught.value)


def _said(params: dict[str, Any], namespace: str) -> Any:
    return SimpleNamespace(kv_transfer_params={"slotstream": {"sample_id": params["sample_id"], "namespace": namespace}})


def _with_server(answer: Any, address: str) -> Any:
    answer.kv_transfer_params["slotstream"]["server"] = address
    return answer


def test_what_cannot_be_captured_is_refused_before_it_is_sent(client: Client, engine: Engine) -> None:
    class AsyncOpenAI:
        pass

    with pytest.raises(ConfigError, match="asynchronous"):
        capture(AsyncOpenAI(), client=client, model="m", prompt="x")
    for request in (dict[str, Any](), dict[str, Any](prompt="x", messages=[])):
        with pytest.raises(ConfigError, match="one of prompt"):
            capture(engine, client=client, model="m", **request)
    with pytest.raises(ConfigError, match="one prompt"):
        capture(engine, client=client, model="m", prompt=["x", "y"], stream=True)
    with pytest.raises(BadSampleId):
        capture(engine, client=client, slotstream={"sample_id": ".."}, model="m", prompt="x")
    assert engine.asked == []
