"""The soak: `python tests/breaking/endurance/soak.py [--seconds 600] [--seed N]`; `make soak` calls it.

One server under several senders, readers, deletions, aborts, peers that break the protocol, and processes that are stopped for
a while. It ends in equal counts on both sides, nothing left over, and memory, descriptors and threads where they were.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

from ledger import NAMESPACE, row_data, token_ids
from support.files import files_below
from support.ingest_client import IngestClient
from support.synthetic import SyntheticSample
from world import Process, World

from slotstream.client import SampleNotFound, connect

_STORED_MAX = 400  # Samples that the deleter leaves.
_LOOK_EVERY_S = 1.0
_GROWTH_BYTES_MAX = 64 << 20
_GROWTH_COUNT_MAX = 16  # Descriptors, or threads: connections and pools breathe.
_RUDE_NAMESPACE = "rude"


@dataclass
class _Seen:
    """What a process held, look by look."""

    resident: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self, process: Process) -> None:
        self.resident.append(process.resident_bytes())
        self.descriptors.append(process.descriptors())
        self.threads.append(process.threads())

    @staticmethod
    def quarters(values: Sequence[int]) -> tuple[int, int]:
        """Medians of the second quarter, when everything is warm, and of the last."""
        size = max(1, len(values) // 4)
        return int(statistics.median(values[size : 2 * size] or values)), int(statistics.median(values[-size:]))


class Soak:
    """One run. `problems` is empty when all is well."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()
        self.seen = {process.name: _Seen() for process in (world.server, *world.senders)}
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._deleted_committed = 0
        self._deleted_failed = 0
        self._rude_failed = 0

    def run(self, seconds: float) -> None:
        jobs = (self._read, self._read, self._delete, self._be_rude, self._interrupt)
        threads = [threading.Thread(target=self._guarded, args=(job, self._rng.randrange(1 << 30))) for job in jobs]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.problems:
            time.sleep(_LOOK_EVERY_S)
            for process in (self.world.server, *self.world.senders):
                self.seen[process.name].look(process)
        self._stop.set()
        for thread in threads:
            thread.join()
        self._count()
        self._compare_footprints()

    def _guarded(self, job: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set() and not self.problems:
            try:
                job(rng)
            except Exception as error:
                self.problems.append(f"{job.__name__}: {type(error).__name__}: {error}")

    # The load beside the senders.

    def _read(self, rng: random.Random) -> None:
        """Lists, and reads what was committed last: whole, or in part, and all of it right."""
        with connect(self.world.address) as client:
            for count, info in enumerate(client.list(namespace=NAMESPACE, state="committed")):
                if count == 50 or self._stop.is_set():
                    break
                start = rng.randrange(info.num_tokens)
                stop = rng.randint(start, info.num_tokens)
                try:
                    with client.read(info.sample_id, namespace=NAMESPACE, start=start, stop=stop, wait_s=0) as reader:
                        ids, data = list(reader.token_ids), b"".join(bytes(block.data) for block in reader)
                except SampleNotFound:
                    continue  # Deleted meanwhile.
                rows = row_data(info.sample_id, info.num_tokens)
                row_bytes = len(rows) // info.num_tokens
                wanted = rows[start * row_bytes : stop * row_bytes], token_ids(info.sample_id, info.num_tokens)[start:stop]
                if (data, ids) != wanted:
                    self.problems.append(f"wrong rows of {info.sample_id} were served")
                self.done["reads"] += 1
        self._stop.wait(0.05)

    def _delete(self, rng: random.Random) -> None:
        """Keeps the store at a size; the samples that were aborted go too."""
        with connect(self.world.address) as client:
            for state in ("committed", "failed"):
                for info in list(client.list(namespace=NAMESPACE, state=state))[_STORED_MAX:]:
                    if self._stop.is_set():
                        return
                    client.delete(info.sample_id, namespace=NAMESPACE)
                    self.done["deletions"] += 1
                    if state == "committed":
                        self._deleted_committed += 1
                    else:
                        self._deleted_failed += 1
        self._stop.wait(0.5)

    def _be_rude(self, rng: random.Random) -> None:
        """A peer that opens samples and leaves: with a violation, without a word, or by saying that it gives them up."""
        samples = [SyntheticSample(f"rude-{rng.randrange(1 << 60)}-{n}", _RUDE_NAMESPACE) for n in range(rng.randint(1, 20))]
        with IngestClient(self.world.address) as peer:
            numbers = [peer.open(sample) for sample in samples]
            for number, sample in zip(numbers, samples, strict=True):
                peer.send_rows(number, sample, 0, 8)
            self._rude_failed += len(samples)
            match rng.randrange(3):
                case 0:
                    peer.send_raw(b"\xff" * 9)
                case 1:
                    for number in numbers:
                        peer.abort(number)
        self.done["rude streams"] += 1
        self._stop.wait(0.3)

    def _interrupt(self, rng: random.Random) -> None:
        """Stops a process for less than it takes the other end to give up: nothing may be lost by that."""
        self._stop.wait(1 + rng.random() * 3)
        victim = rng.choice((self.world.server, *self.world.senders))
        victim.send(signal.SIGSTOP)
        time.sleep(rng.random())
        victim.send(signal.SIGCONT)
        self.done["interruptions"] += 1

    # The end.

    def _count(self) -> None:
        for sender in self.world.senders:
            code = sender.end(signal.SIGTERM)
            if code:
                self.problems.append(f"{sender.name} ended with {code}:\n{sender.log()[-2000:]}")
        promised = list(self.world.promises())
        outcomes = Counter(promise.outcome or "nothing heard" for promise in promised)
        self.done["samples promised"] = len(promised)
        self.done.update({f"senders heard: {outcome}": count for outcome, count in outcomes.items()})
        deadline = time.monotonic() + 30
        while (gauges := self.world.scrape())["slotstream_open_samples"] and time.monotonic() < deadline:
            time.sleep(0.05)
        ended: Counter[str] = Counter()
        for name, value in gauges.items():
            if name.startswith("slotstream_samples_total"):
                ended["failed" if 'outcome="failed"' in name else "committed"] += int(value)
        self.done.update({f"server says: {outcome}": count for outcome, count in ended.items()})
        for transport in ("grpc", "nixl"):
            self.done[f"chunks over {transport}"] = int(gauges.get(f'slotstream_chunks_total{{transport="{transport}"}}', 0))
        stored = {
            state: int(gauges[f'slotstream_stored_samples{{state="{state}"}}']) for state in ("arriving", "committed", "failed")
        }
        files = len(files_below(self.world.data_dir, ".safetensors"))
        self._equal("samples committed", outcomes["committed"], ended["committed"])
        self._equal("samples failed", outcomes["failed"] + self._rude_failed, ended["failed"])
        self._equal("samples without an outcome", outcomes["nothing heard"], 0)
        self._equal("samples stored", ended["committed"] - self._deleted_committed, stored["committed"])
        self._equal("failures shown", ended["failed"] - self._deleted_failed, stored["failed"])
        self._equal("files", stored["committed"], files)
        self._equal("samples arriving", stored["arriving"], 0)
        self._equal("partial files", len(files_below(self.world.data_dir, ".partial")), 0)
        for gauge in ("open_samples", "held_bytes", "ingest_streams", "reads", "waiting_reads"):
            self._equal(gauge, int(gauges[f"slotstream_{gauge}"]), 0)

    def _equal(self, what: str, one: int, other: int) -> None:
        if one != other:
            self.problems.append(f"{what}: {one} and {other}")

    def _compare_footprints(self) -> None:
        for name, seen in self.seen.items():
            before, after = seen.quarters(seen.resident)
            if after - before > _GROWTH_BYTES_MAX:
                self.problems.append(f"{name}: memory grew from {before >> 20} to {after >> 20} MiB")
            for what, values in (("descriptors", seen.descriptors), ("threads", seen.threads)):
                before, after = seen.quarters(values)
                if after - before > _GROWTH_COUNT_MAX:
                    self.problems.append(f"{name}: {what} grew from {before} to {after}")

    def table(self) -> str:
        lines = [f"{'':12}{'MiB warm':>10}{'end':>8}{'most':>8}{'files':>8}{'end':>8}{'threads':>10}{'end':>8}"]
        for name, seen in self.seen.items():
            warm, end = (value >> 20 for value in seen.quarters(seen.resident))
            files, threads = seen.quarters(seen.descriptors), seen.quarters(seen.threads)
            most = max(seen.resident) >> 20
            lines.append(f"{name:12}{warm:>10}{end:>8}{most:>8}{files[0]:>8}{files[1]:>8}{threads[0]:>10}{threads[1]:>8}")
        lines += [f"{count:>12}  {what}" for what, count in sorted(self.done.items())]
        lines += [f"       WRONG  {problem}" for problem in self.problems]
        return "\n".join(lines)


def run_soak(seconds: float, seed: int, *, senders: int = 3, streams: int = 1) -> Soak:
    with World(senders, seed % 1000, streams=streams) as world:
        world.wait_for_traffic()
        soak = Soak(world, seed)
        soak.run(seconds)
        return soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="0: any, and it is printed")
    parser.add_argument("--senders", type=int, default=3)
    parser.add_argument("--streams", type=int, default=1, help="of each sender")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # In order: the processes end with us.
    seed = arguments.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    soak = run_soak(arguments.seconds, seed, senders=arguments.senders, streams=arguments.streams)
    print(soak.table())
    print("FAILED" if soak.problems else "equal on both sides, and nothing left behind")
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
