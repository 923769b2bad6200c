"""From lines to stored samples: what is stored already is not sent, the rest is, and each line's fate is noted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slotstream.capture.engine import Engine, EngineAway, EngineRefused
from slotstream.capture.lines import Job, Line, sample_id
from slotstream.capture.manifest import FAILED, STORED, WAITING, Manifest, Outcome
from slotstream.client import Client, SampleFailed, SampleNotFound
from slotstream.wire.errors import ConfigError, DeadlineExceeded, ServerUnavailable, SlotStreamError
from slotstream.wire.layers import DRAFT, EAGLE3

OUTPUT, ASSISTANT = "output", "assistant"
_ALREADY = "ALREADY_EXISTS"
_PAUSE_S = 0.1
_AWAY = (EngineAway, ServerUnavailable)


class Misplaced(Exception):
    """The first sample shows that this engine's rows cannot be what was asked for: where they go, or which they are."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a job is carried out. mask_of: the assistant's spans of a chat, with what the engine makes of it."""

    namespace: str
    jobs: int = 128
    wait_s: float = 120.0
    mask_of: Callable[[Sequence[Any], Sequence[int]], list[list[int]]] | None = None


class Run:
    """One run over the lines of a job."""

    def __init__(self, client: Client, engines: Sequence[Engine], job: Job, setting: Setting, manifest: Manifest) -> None:
        self._client = client
        self._engines = engines
        self._job = job
        self._setting = setting
        self._manifest = manifest
        self._lock = threading.Lock()
        self._stored: set[str] = set()
        self._sent: dict[str, Future[Outcome]] = {}  # By id: lines that are equal are sent once.
        self._ended: dict[int, Outcome] = {}  # By the line's number: what is known of those that are over.
        self._away: Exception | None = None
        self._is_cut_short = False
        self._begun = 0  # By the server's clock.

    def over(self, lines: Sequence[Line], told: Callable[[Outcome], None]) -> Exception | None:
        """Every line; `told` of each. Returns why it ended early: an engine, or the server, is away.

        Raises Misplaced, and what `Client.list` raises. Where it raises, also what a signal raises here, the requests that are
        under way are ended, the client is closed, and `told` hears of all other lines, of one perhaps twice.
        """
        left = {line.number: line for line in lines}

        def tell(outcome: Outcome) -> None:
            told(outcome)
            left.pop(outcome.line)

        try:
            self._over(lines, tell)
        except BaseException:
            self._cut_short()
            for line in left.values():
                told(self._ended.get(line.number) or self._waiting(line))
            raise
        return self._away

    def _over(self, lines: Iterable[Line], told: Callable[[Outcome], None]) -> None:
        self._begun = self._client.moment(namespace=self._setting.namespace)
        listed = self._client.list(namespace=self._setting.namespace, state="COMMITTED")
        self._stored = {info.sample_id for info in listed}
        todo: list[Line] = []
        for line in lines:
            known = self._manifest.ids.get(line.key)
            if known in self._stored:
                told(self._noted(Outcome(line.number, line.key, known, STORED)))
            else:
                todo.append(line)
        begun = self._first(todo, told)
        self._others(todo[begun:], told)

    def _first(self, todo: Sequence[Line], told: Callable[[Outcome], None]) -> int:
        """Lines one by one until a sample is there: only then is it known where this engine's rows go. Their number."""
        for number, line in enumerate(todo, start=1):
            outcome = self._outcome(line, self._engines[0], check=True)
            told(outcome)
            if outcome.state != FAILED:
                return number
        return len(todo)

    def _others(self, todo: Sequence[Line], told: Callable[[Outcome], None]) -> None:
        waiting: queue.SimpleQueue[Line] = queue.SimpleQueue()
        done: queue.SimpleQueue[Outcome | BaseException] = queue.SimpleQueue()
        for line in todo:
            waiting.put(line)

        def work(engine: Engine) -> None:
            while True:
                try:
                    line = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put(self._outcome(line, engine))
                except BaseException as error:  # Raised where the others are waited for.
                    done.put(error)

        with ThreadPoolExecutor(max(1, self._setting.jobs)) as pool:
            for number in range(min(self._setting.jobs, len(todo))):
                pool.submit(work, self._engines[number % len(self._engines)])
            try:
                for _ in todo:
                    outcome = done.get()
                    if isinstance(outcome, BaseException):
                        raise outcome
                    told(outcome)
            except BaseException:
                self._cut_short()  # Before the pool waits for its threads.
                raise

    def _cut_short(self) -> None:
        """Nothing more is sent, and what is under way is given up: its lines wait for the next run."""
        self._is_cut_short = True
        for engine in self._engines:
            engine.close()
        self._client.close()

    def _outcome(self, line: Line, engine: Engine, *, check: bool = False) -> Outcome:
        if self._is_over:
            return self._waiting(line)
        try:
            return self._noted(self._of_line(line, engine, check))
        except _AWAY as error:
            self._away = error
            return self._waiting(line)
        except Exception as error:
            if self._is_cut_short:  # It says no more than that.
                return self._waiting(line)
            if not isinstance(error, EngineRefused | SlotStreamError | ConfigError):
                raise
            code = getattr(error, "code", "CONFIG")
            return self._noted(Outcome(line.number, line.key, None, FAILED, code, str(error)))

    @property
    def _is_over(self) -> bool:
        return self._is_cut_short or self._away is not None

    def _waiting(self, line: Line) -> Outcome:
        return Outcome(line.number, line.key, self._manifest.ids.get(line.key), WAITING)

    def _noted(self, outcome: Outcome) -> Outcome:
        self._manifest.add(outcome)
        self._ended[outcome.line] = outcome
        return outcome

    def _of_line(self, line: Line, engine: Engine, check: bool) -> Outcome:
        """Raises what ends the line, or the run."""
        token_ids = list(line.token_ids or engine.token_ids(line.prompt, line.messages))
        mask = self._mask(line, token_ids)
        name = sample_id(line, self._job, token_ids, mask)
        with self._lock:
            before = self._sent.get(name)
            if before is None:
                mine = self._sent[name] = Future()
        if before is not None:
            same = before.result()
            return Outcome(line.number, line.key, name, same.state, same.code, same.message)
        outcome = Outcome(line.number, line.key, name, WAITING)
        try:
            if line.sample_id is not None and name in self._stored:  # Under this id, but not as this line's, or not by us.
                raise _failed({"code": _ALREADY, "message": f"a sample {name!r} is stored, and not noted as this line's"})
            if name not in self._stored:
                # Noted before it is sent: a run that is killed now finds its id again without the engine.
                self._manifest.add(outcome)
                self._send(line, engine, token_ids, mask, name, check)
            outcome = Outcome(line.number, line.key, name, STORED)
        except (EngineRefused, SlotStreamError) as error:
            if isinstance(error, _AWAY) or self._is_cut_short:
                raise
            code = error.reason if isinstance(error, SampleFailed) and error.reason else error.code
            outcome = Outcome(line.number, line.key, name, FAILED, code, str(error))
        finally:
            mine.set_result(outcome)
        return outcome

    def _mask(self, line: Line, token_ids: Sequence[int]) -> Any:
        """What the request's `loss_mask` is. Raises ConfigError."""
        if line.loss_mask is not None or self._job.loss_mask != ASSISTANT:
            return line.loss_mask if line.loss_mask is not None else self._job.loss_mask
        if line.messages is None or self._setting.mask_of is None:
            raise ConfigError(f'loss mask "{ASSISTANT}" is of chats, and this line has no messages')
        spans = self._setting.mask_of(line.messages, token_ids)
        if self._job.output_rows:
            spans.append([len(token_ids), len(token_ids) + (line.max_tokens or self._job.max_tokens)])
        return spans

    def _send(self, line: Line, engine: Engine, token_ids: list[int], mask: Any, name: str, check: bool) -> None:
        job, setting = self._job, self._setting
        params: dict[str, Any] = {"sample_id": name, "namespace": setting.namespace, "tags": dict(line.tags)}
        params |= {"capture": True, "include_output_tokens": job.output_rows}
        if mask is not None:
            params["loss_mask"] = mask
        body: dict[str, Any] = {"prompt": token_ids, "max_tokens": line.max_tokens or job.max_tokens}
        body |= {"temperature": job.temperature, "kv_transfer_params": {"slotstream": params}}
        if job.seed is not None:
            body["seed"] = job.seed
        said = engine.complete(body)
        if said is None:
            raise Misplaced(
                f"the engine at {engine.url} says nothing of a capture: it has no slotstream connector, or capture is off"
            )
        if (error := said.get("error")) and (error.get("code") != _ALREADY or line.sample_id is not None):
            raise _failed(error)
        try:
            names = self._stored_layers(name)
            if check:
                self._check_layers(engine, names)
        except (SampleNotFound, DeadlineExceeded) as missing:
            if not check:
                raise
            raise Misplaced(
                f"the first sample of the engine at {engine.url} did not come to {self._client.address} ({missing}): the "
                f"engine sends to {said.get('server')}"
            ) from missing

    def _stored_layers(self, name: str) -> Sequence[str]:
        """The names of a sample's layers, once it is committed. Raises what `Client.read` raises."""
        ends = time.monotonic() + self._setting.wait_s
        while True:
            try:
                with self._client.read(name, namespace=self._setting.namespace, stop=0, wait_s=self._setting.wait_s) as reader:
                    return reader.layer_names
            except SampleFailed:
                # Perhaps of an earlier run: until the engine opens it anew, that is what the server knows of it.
                # It may be open by now, and not a failure any more.
                now = self._client.stat(name, namespace=self._setting.namespace)
                if (now.state == "FAILED" and now.created_unix_ns >= self._begun) or time.monotonic() >= ends:
                    raise
            time.sleep(_PAUSE_S)

    def _check_layers(self, engine: Engine, names: Sequence[str]) -> None:
        asked = self._job.layers
        if not isinstance(asked, str) and sorted(map(str, asked)) != sorted(names):
            wanted = ",".join(map(str, asked))
            raise Misplaced(f"the engine at {engine.url} captures layers {','.join(names)}, and --layers says {wanted}")


def _failed(error: Any) -> SampleFailed:
    return SampleFailed(str(error.get("message")), str(error.get("code")))


def layers_option(text: str) -> tuple[tuple[int | str, ...] | str, Any]:
    """`--layers` as a job has it, and as the connector's option: 2,18,final or eagle3 or draft:PATH. Raises ConfigError."""
    if text == EAGLE3:
        return text, text
    if text.startswith(f"{DRAFT}:"):
        return text, {DRAFT: text.partition(":")[2]}
    try:
        layers = tuple(word if word == "final" else int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"layers {text!r} are neither like 2,18,final nor {EAGLE3} nor {DRAFT}:PATH") from None
    return layers, list(layers)
