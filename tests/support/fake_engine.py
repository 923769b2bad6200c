"""An OpenAI server that stores what it is asked to capture, as vLLM with the connector would: a token a byte."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from support.ingest_client import IngestClient
from support.synthetic import SyntheticSample

LAYERS = (2, 4, 8, 9)
TOKENS_MAX = 200


class FakeEngine:
    """Serves `model` while its `with` block lasts. `completions` and `tokenized` are the bodies that came.

    before: called with each completion, may raise to refuse it: an int is the HTTP status, a str a capture's error code, bytes
    the whole answer. garbled: answers by path, in place of all others.
    """

    def __init__(
        self, ingest: IngestClient, server: str, before: Callable[[Mapping[str, Any]], Any] = lambda body: None
    ) -> None:
        self._ingest = ingest
        self._server = server
        self._before = before
        self._lock = threading.Lock()
        self._ids: set[tuple[str, str]] = set()
        self.root = "org/model"
        self.captures = True
        self.completions: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, Any]] = []
        self.garbled: dict[str, bytes] = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                listing = {"data": [{"id": "served", "root": engine.root}]}
                self._answer(200, engine.garbled.get(self.path, listing))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = engine.answer(self.path, body)
                self._answer(status, answer)

            def _answer(self, status: int, answer: Any) -> None:
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *unused: Any) -> None:
                """Tests look at what came, and not at a log."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in self.garbled:
            return 200, self.garbled[path]
        if path == "/tokenize":
            self.tokenized.append(body)
            text = body["prompt"] if "prompt" in body else "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
            return 200, {"tokens": list(text.encode())}
        assert path == "/v1/completions", path
        assert body["model"] == "served"
        with self._lock:
            self.completions.append(body)
            refusal = self._before(body)
            if isinstance(refusal, int):
                return refusal, {"error": {"message": "not today"}}
            if isinstance(refusal, bytes):
                return 200, refusal
            if not self.captures:
                return 200, {"choices": [{"text": "x"}]}
            params = body["kv_transfer_params"]["slotstream"]
            said: dict[str, Any] = {"server": self._server}
            if isinstance(refusal, str):
                said["error"] = {"code": refusal, "message": "no rows"}
            elif (params["namespace"], params["sample_id"]) not in self._ids:
                self._store(params, body["prompt"])
        return 200, {"choices": [{"text": "x"}], "kv_transfer_params": {"slotstream": said}}

    def _store(self, params: Mapping[str, Any], tokens: list[int]) -> None:
        self._ids.add((params["namespace"], params["sample_id"]))
        metadata = {"layer_names": json.dumps([*map(str, LAYERS[:-1]), "final"]), "num_hidden_layers": "8"}
        sample = SyntheticSample(
            params["sample_id"],
            namespace=params["namespace"],
            layer_ids=LAYERS,
            num_tokens=len(tokens),
            tags=params.get("tags", {}),
            metadata=metadata,
        )
        mask = params.get("loss_mask")
        number = self._ingest.open(sample, columns=[] if mask is None else ["loss_mask"])
        self._ingest.send_rows(number, sample)
        held = {} if mask is None else {"loss_mask": bytes(any(a <= i < b for a, b in mask) for i in range(len(tokens)))}
        self._ingest.commit(number, sample, columns=held)

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
