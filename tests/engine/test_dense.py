"""The main job on a dense model: real vLLM over HTTP, 64-token steps, every row checked."""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.outage import capture_is_refused, capture_works, metric, scrape
from support.prometheus import QUIET, Prometheus, alert_expressions, dashboard_expressions
from support.stack import Stack
from support.waiting import wait_until
from support.workload import LAYER_IDS, MODEL_NAME, Ask, assert_rows_are_true, check_exact, random_prompts, send, text_tokens

from slotstream.client import Client, EngineStatus
from slotstream.demo.processes import complete

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def _still_serves(port: int, **params: object) -> bool:
    """One request more: vLLM tells its metrics with its steps."""
    (answer,) = send(port, [Ask(text_tokens(random.Random(0), 8), params)])
    return bool(answer.tokens)


def test_every_expression_of_the_dashboard_and_the_alerts_finds_what_a_real_run_exports(dense: Stack, tmp_path: Path) -> None:
    """First in the module: all is well yet. Then the server is away for a while."""
    alerts = alert_expressions()
    with Prometheus(tmp_path, {"slotstream": dense.metrics_port, "vllm": dense.vllm_port}) as prometheus:
        for number in range(2):
            asks = [Ask(text_tokens(random.Random(f"{number}{i}"), 40), {"sample_id": f"s{number}-{i}"}) for i in range(3)]
            send(dense.vllm_port, asks)
            opened = f"slotstream_connector_samples_opened_total >= {3 * number + 3}"
            # The sender may count behind the last step of these.
            wait_until(lambda o=opened: _still_serves(dense.vllm_port, capture=False) and prometheus.knows(o))  # type: ignore[misc]
        wait_until(lambda: prometheus.knows("slotstream_stored_samples{state='committed'} == 6"))
        # A rate needs two samples of the same series.
        wait_until(lambda: prometheus.knows("count_over_time(slotstream_connector_rows_total[5m]) > 3"))
        for expression in dashboard_expressions():
            assert prometheus.ask(expression) or QUIET.search(expression), expression
        for name, expression in alerts.items():
            assert not prometheus.ask(expression), name
        dense.stop_serving()
        capture_is_refused(dense, "unseen")
        wait_until(lambda: prometheus.knows('slotstream_connector_capture_off{reason="SERVER_UNAVAILABLE"} == 1'))
        wait_until(lambda: prometheus.knows('up{job="slotstream"} == 0'))
        for name in ("SlotstreamDown", "SlotstreamCaptureOff", "SlotstreamConnectorOutage"):
            wait_until(lambda n=name: _still_serves(dense.vllm_port) and prometheus.knows(alerts[n]), name)  # type: ignore[misc]
    dense.serve()
    capture_works(dense, "seen")


def test_every_row_is_right_and_again_when_nearly_everything_is_a_prefix_hit(dense: Stack, client: Client) -> None:
    prompts = random_prompts(random.Random(1), 40)
    first = check_exact(client, dense.vllm_port, "first", prompts)
    second = check_exact(client, dense.vllm_port, "second", prompts)
    assert [a.tokens for a in first] == [a.tokens for a in second]
    hits = sum(int(info.metadata["prefix_hit_tokens"]) for info in client.list(namespace="second"))
    assert hits > 0.8 * sum(len(p) - 32 for p in prompts if len(p) > 32)


def test_status_shows_the_engine_as_it_is(dense: Stack, client: Client) -> None:
    asks = [Ask(text_tokens(random.Random(3), 40), {"namespace": "status", "sample_id": "seen"})]
    send(dense.vllm_port, asks)
    client.get("seen", namespace="status")

    def connected() -> EngineStatus:
        server = client.status().server
        assert server is not None
        (engine,) = [one for one in server.engines if one.connected]
        return engine

    wait_until(lambda: connected().last_sample == "status/seen")
    engine = connected()
    assert engine.host == os.uname().nodename
    assert engine.layers == tuple(map(str, LAYER_IDS))
    assert engine.engine_id == client.stat("seen", namespace="status").metadata["engine_id"]
    assert 0 <= (engine.staging_bytes_in_use or 0) < (engine.staging_bytes or 0)
    assert engine.report_s is not None
    assert engine.report_s < 60


def test_output_rows_are_those_of_the_confirmed_text(dense: Stack, client: Client) -> None:
    rng = random.Random(2)
    asks = [
        Ask(text_tokens(rng, n), {"namespace": "outputs", "sample_id": f"o{n}", "include_output_tokens": True}, max_tokens=100)
        for n in (1, 33, 200)
    ]
    for ask, answer in zip(asks, send(dense.vllm_port, asks), strict=True):
        assert answer.said is not None
        sample = client.get(answer.said["sample_id"], namespace="outputs")
        # The last sampled token is never run through the model.
        assert answer.said["num_tokens"] == len(sample.token_ids) == len(ask.prompt) + ask.max_tokens - 1
        assert sample.token_ids.tolist() == ask.prompt + answer.tokens[:-1]
        assert_rows_are_true(sample)


def test_a_stop_string_ends_a_capture_with_its_rows_kept(dense: Stack, client: Client) -> None:
    """vLLM finds the string outside the engine and aborts the request there."""
    prompt = text_tokens(random.Random(10), 40)
    (free,) = send(dense.vllm_port, [Ask(prompt, {"capture": False}, max_tokens=200)])
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    text = complete(dense.vllm_port, {**body, "kv_transfer_params": {"slotstream": {"capture": False}}})["choices"][0]["text"]
    stop = next(c for c in text if c.isascii() and c.isprintable())
    params = {"slotstream": {"namespace": "stops", "sample_id": "s", "include_output_tokens": True}}
    answer = complete(dense.vllm_port, {**body, "stop": [stop], "kv_transfer_params": params})
    assert answer["choices"][0]["finish_reason"] == "stop"
    sample = client.get("s", namespace="stops")
    assert sample.metadata["finish_reason"] == "stop_or_abort"
    kept = sample.token_ids.tolist()
    assert kept == (prompt + free.tokens)[: len(kept)]
    assert len(prompt) < len(kept) < len(prompt) + 199
    assert_rows_are_true(sample)


def test_layer_subsets_and_ranges_are_exactly_those_rows(dense: Stack, client: Client) -> None:
    prompt = text_tokens(random.Random(3), 700)
    send(dense.vllm_port, [Ask(prompt, {"namespace": "ranges", "sample_id": "s"})])
    whole = client.get("s", namespace="ranges")
    for start, stop in ((0, 1), (63, 65), (100, 612), (699, 700), (5, None)):
        for layers in ([3], [LAYER_IDS[-1], 1], None):
            part = client.get("s", namespace="ranges", start=start, stop=stop, layers=layers)
            columns = [LAYER_IDS.index(i) for i in layers or LAYER_IDS]
            assert torch.equal(part.hidden_states, whole.hidden_states[start:stop][:, columns])
            assert part.token_ids.tolist() == prompt[start:stop]
            assert part.layer_ids == tuple(layers or LAYER_IDS)


def test_a_window_of_the_prompt_and_opting_out(dense: Stack, client: Client) -> None:
    prompt = text_tokens(random.Random(4), 300)
    params = {"namespace": "window", "tags": {"kind": "window"}}
    window, none = send(
        dense.vllm_port,
        [Ask(prompt, {**params, "sample_id": "w", "tokens": [70, 201]}), Ask(prompt, {**params, "capture": False})],
    )
    assert window.said is not None
    assert window.said["num_tokens"] == 131
    sample = client.get("w", namespace="window")
    assert sample.token_ids.tolist() == prompt[70:201]
    assert sample.metadata["token_start"] == "70"
    assert_rows_are_true(sample)
    assert none.said is None
    assert [info.sample_id for info in client.list(namespace="window", tags={"kind": "window"})] == ["w"]


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"sample_id": "../../x"}, "BAD_SAMPLE_ID"),
        ({"sample_id": ""}, "BAD_SAMPLE_ID"),
        ({"sample_id": "x" * 10_000}, "BAD_SAMPLE_ID"),
        ({"sample_id": 7}, "BAD_SAMPLE_ID"),
        ({"namespace": "../up"}, "BAD_NAMESPACE"),
        ({"namespace": "catalog.sqlite"}, "BAD_NAMESPACE"),
        ({"tokens": [0, 10_000]}, "BAD_TOKEN_RANGE"),
        ({"tokens": [5, 5]}, "BAD_TOKEN_RANGE"),
        ({"tokens": [-1, 5]}, "BAD_TOKEN_RANGE"),
        ({"tokens": "all"}, "BAD_TOKEN_RANGE"),
        ({"smaple_id": "typo"}, "BAD_PARAMS"),
        ({"capture": "yes"}, "BAD_PARAMS"),
        ({"tags": {"k": 1}}, "BAD_TAGS"),
    ],
)
def test_bad_params_are_answered_and_nothing_is_written(
    dense: Stack, client: Client, params: dict[str, object], code: str
) -> None:
    before = sorted(p for p in (dense.work / "data").rglob("*.safetensors"))
    (answer,) = send(dense.vllm_port, [Ask(text_tokens(random.Random(5), 20), params)])
    assert len(answer.tokens) == 4
    assert answer.said is not None
    assert answer.said["error"]["code"] == code
    assert len(answer.said["error"]["message"]) < 300
    assert sorted(p for p in (dense.work / "data").rglob("*.safetensors")) == before
    assert not (dense.work / "x.safetensors").exists()


def test_the_same_id_again_is_stored_once_and_other_content_is_refused(dense: Stack, client: Client) -> None:
    rng = random.Random(6)
    prompt, other = text_tokens(rng, 100), text_tokens(rng, 100)
    params = {"namespace": "again", "sample_id": "a"}
    send(dense.vllm_port, [Ask(prompt, params), Ask(prompt, params)], at_once=1)
    send(dense.vllm_port, [Ask(other, params)])
    # The refusal comes after the answer: it shows in vLLM's own metrics with the next step.
    for _ in range(100):
        send(dense.vllm_port, [Ask(prompt, {"capture": False})])
        if metric(scrape(dense.vllm_port), "slotstream_connector_samples_failed_total", code="ALREADY_EXISTS"):
            break
    assert metric(scrape(dense.vllm_port), "slotstream_connector_samples_failed_total", code="ALREADY_EXISTS") == 1
    assert client.get("a", namespace="again").token_ids.tolist() == prompt
    assert len(list(client.list(namespace="again"))) == 1


def test_early_chunks_are_on_the_server_before_the_last_is_computed(dense: Stack, client: Client) -> None:
    prompt = text_tokens(random.Random(7), 900)
    # Some text after the prompt: steps in which a busy machine's server comes to its turn too.
    params = {"namespace": "stream", "sample_id": "s", "include_output_tokens": True}
    send(dense.vllm_port, [Ask(prompt, params, max_tokens=80)])
    said = client.get("s", namespace="stream").metadata
    assert int(said["chunks"]) >= len(prompt) // 64
    # Both are this host's clock: the server had a chunk before the connector had the last row.
    assert int(said["first_chunk_unix_ns"]) < int(said["last_rows_unix_ns"]) < int(said["committed_unix_ns"])


def test_standard_tools_see_standard_things(dense: Stack, client: Client) -> None:
    prompt = text_tokens(random.Random(8), 150)
    send(dense.vllm_port, [Ask(prompt, {"namespace": "plain", "sample_id": "s"})])
    sample = client.get("s", namespace="plain")
    (path,) = (dense.work / "data" / "plain").rglob("s.safetensors")
    tensors = load_file(path)
    assert set(tensors) == {"hidden_states", "token_ids"}
    assert torch.equal(tensors["hidden_states"], sample.hidden_states)
    assert torch.equal(tensors["token_ids"], sample.token_ids)
    with sqlite3.connect(f"file:{dense.work / 'data' / 'catalog.sqlite'}?mode=ro", uri=True) as catalogue:
        row = catalogue.execute("SELECT state, num_tokens FROM samples WHERE sample_id='s' AND namespace='plain'").fetchone()
    assert row == ("committed", len(prompt))
    assert "# TYPE" in scrape(dense.metrics_port)


def test_vllm_counts_the_tokens_that_an_alert_asks_for(dense: Stack) -> None:
    """`vllm:generation_tokens_total`, of deploy/prometheus/rules.yaml."""
    ask = Ask(text_tokens(random.Random(9), 20), {"capture": False}, max_tokens=7)
    before = metric(scrape(dense.vllm_port), "vllm:generation_tokens_total")
    send(dense.vllm_port, [ask])
    wait_until(lambda: metric(scrape(dense.vllm_port), "vllm:generation_tokens_total") >= before + 7)


def test_an_outage_fails_captures_and_nothing_else_and_ends_by_itself(dense: Stack) -> None:
    """Last in the module: it stops the server."""
    capture_works(dense, "before")
    assert dense.stop_serving() == 0
    capture_is_refused(dense, "outage")
    dense.serve()
    capture_works(dense, "after")
