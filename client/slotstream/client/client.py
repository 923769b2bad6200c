"""The synchronous client: `with connect("127.0.0.1:50151") as client: client.get("my-sample")`."""

from __future__ import annotations

import builtins
import datetime
import logging
import math
import operator
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from slotstream.client.call_errors import NotServed
from slotstream.client.counting import ReadCounter
from slotstream.client.info import (
    Forecast,
    NamespaceUsage,
    Page,
    Restored,
    SampleInfo,
    SampleState,
    Usage,
    Verdict,
    unix_ns,
    wire_state,
)
from slotstream.client.local_file import WrongFileError
from slotstream.client.many import READS_FIRST, Listed, ManyReads
from slotstream.client.reading import RowReader
from slotstream.client.rpc import Rpc
from slotstream.client.status import Status
from slotstream.client.tensors import Answer, Sample, receive_sample, require_torch
from slotstream.v1 import samples_pb2
from slotstream.wire.access import Access, token_from_environment
from slotstream.wire.columns import further_columns
from slotstream.wire.errors import (
    BadLayers,
    BadPage,
    BadParams,
    BadSampleId,
    BadTags,
    BadTokenRange,
    ConfigError,
    SampleFailed,
    SampleNotFound,
    SlotStreamError,
)
from slotstream.wire.names import (
    DEFAULT_ADDRESS,
    DEFAULT_NAMESPACE,
    FINAL,
    LAYERS_MAX,
    LEASE_S_MAX,
    PAGE_SIZE_MAX,
    READ_WAIT_S_MAX,
    ROWS_MAX,
    TAG_FILTERS_MAX,
    check_holder,
    check_namespace,
    check_sample_id,
    check_tags,
)

_log = logging.getLogger(__name__)
SERVER_VARIABLE = "SLOTSTREAM_SERVER"
TOKEN_FILE_VARIABLE = "SLOTSTREAM_TOKEN_FILE"
TLS_VARIABLES = ("SLOTSTREAM_TLS_CA", "SLOTSTREAM_TLS_CERT", "SLOTSTREAM_TLS_KEY")
# Verify answers once a sample, and the largest one takes minutes to hash.
_VERIFY_STALL_S = 3600.0


def connect(
    address: str | Sequence[str] | None = None,
    *,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    connect_timeout_s: float = 10.0,
    call_timeout_s: float = 30.0,
    stall_timeout_s: float = 60.0,
) -> Client:
    """A client of the server at `address` (`host:port` or `unix:/path`); by default `$SLOTSTREAM_SERVER`, else 127.0.0.1:50151.

    address: also several, as a list or with commas between, of servers that hold the same samples. One of them is asked, any;
    where it is away, or shuts down, each other one is, before a call fails (docs/client.md says which calls).
    token, token_file: the bearer token for a server that wants one, or a file with it, which is read again for each call;
    by default `$SLOTSTREAM_TOKEN` or `$SLOTSTREAM_TOKEN_FILE`.
    tls_ca: PEM file of the authorities that signed the server's certificate; turns TLS on. tls_cert, tls_key: PEM files of
    this client's own certificate. By default `$SLOTSTREAM_TLS_CA`, `$SLOTSTREAM_TLS_CERT` and `$SLOTSTREAM_TLS_KEY`; any of
    the three that is given here replaces them all.
    data_dir: where this machine has the server's data directory, for `get` and `read` to take rows out of the files: several
    times as fast, and checked all the same. Everything else is asked of the server, as are rows that cannot be read there.
    connect_timeout_s: how long to wait for the server to take the connection; 0: do not wait, let the first call find out.
    call_timeout_s: the deadline of `stat`, of `delete` and of each page of `list`.
    stall_timeout_s: how long a transfer may stand still. A transfer that progresses has no deadline, however large it is.

    Raises ConfigError (a ValueError) for a malformed address or time-out, or files that cannot be used; ServerUnavailable
    when nothing answers.
    """
    if not 0 <= connect_timeout_s < math.inf or not 0 < call_timeout_s < math.inf or not 0 < stall_timeout_s < math.inf:
        raise ConfigError("connect_timeout_s must be 0 or more seconds, call_timeout_s and stall_timeout_s more than 0")
    rpc = Rpc(
        os.environ.get(SERVER_VARIABLE) or DEFAULT_ADDRESS if address is None else address,
        timeout_s=call_timeout_s,
        access=_access(token, token_file, tls_ca, tls_cert, tls_key),
    )
    if connect_timeout_s:
        try:
            rpc.wait_until_connected(connect_timeout_s)
        except BaseException:
            rpc.close()
            raise
    return Client(rpc, stall_timeout_s=stall_timeout_s, data_dir=None if data_dir is None else Path(data_dir))


def _access(token: str | None, *paths: str | os.PathLike[str] | None) -> Access:
    token_file, *tls = (None if path is None else os.fspath(path) for path in paths)
    if token is None and token_file is None:
        token = token_from_environment()
        token_file = os.environ.get(TOKEN_FILE_VARIABLE) or None if token is None else None
    if not any(tls):
        tls = [os.environ.get(name) or None for name in TLS_VARIABLES]
    tls_ca, tls_cert, tls_key = tls
    return Access(tls_ca, tls_cert, tls_key, token, token_file)


class Client:
    """Reads, lists, checks and deletes samples. Made by `connect`; safe to share between threads.

    A process that was forked may use the client that it inherited: it makes a new connection. To end a wait in another thread,
    close the client: the wait raises Interrupted then, or ValueError like each later call. Cancelling an asyncio task does not
    end it.

    Ids, ranges and filters are checked before anything is sent (BadSampleId, BadNamespace, BadTokenRange, BadLayers,
    BadTags, BadPage, BadParams). Any call may raise Unauthenticated (no token, or not one that the server knows),
    PermissionDenied (not for this token), ServerUnavailable, or DeadlineExceeded when the server does not answer in time;
    every exception is a SlotStreamError with a stable `code` and a `retryable` flag.
    """

    def __init__(self, rpc: Rpc, *, stall_timeout_s: float, data_dir: Path | None = None) -> None:
        self._rpc = rpc
        self.data_dir = data_dir
        self._said_not_in_place = False
        self._stall_timeout_s = stall_timeout_s
        self._holders: dict[int, str] = {}  # By process: one that was forked leases for itself.
        self._counter = ReadCounter(rpc.count_read)

    @property
    def address(self) -> str:
        """The server's address; of several all of them, with commas between."""
        return self._rpc.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses, as they were given: one or more."""
        return self._rpc.addresses

    @property
    def access(self) -> Access:
        """The token and certificates that its calls use."""
        return self._rpc.access

    def with_token(self, token: str | None) -> Client:
        """This client with another bearer token, or with none, over the same connection: for a process that asks for several
        people. It closes with this one: do not close it. Raises ConfigError for what can be no token.
        """
        return Client(self._rpc.with_token(token), stall_timeout_s=self._stall_timeout_s, data_dir=self.data_dir)

    def get(
        self,
        sample_id: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int | str] | None = None,
        wait_s: float = 30.0,
        verify: bool = True,
        ack: bool = False,
        count: bool = True,
    ) -> Sample:
        """Rows [start, stop) of a sample as tensors; arguments, waiting and errors as in `read`.

        ack: once the tensors are here, `ack` the sample: where the server's rules say so, it deletes it then.

        Raises also ImportError, naming the extra, where torch is not installed.
        """
        require_torch()
        with self.read(
            sample_id, namespace=namespace, start=start, stop=stop, layers=layers, wait_s=wait_s, verify=verify, count=count
        ) as reader:
            sample = receive_sample(reader)
        if ack:
            self.ack(sample_id, namespace=namespace)
        return sample

    def read(
        self,
        sample_id: str,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        start: int = 0,
        stop: int | None = None,
        layers: Sequence[int | str] | None = None,
        wait_s: float = 30.0,
        verify: bool = True,
        count: bool = True,
    ) -> RowReader:
        """Rows [start, stop) of a sample as bytes, without torch: the facts at once, the rows by iterating the reader.

        start, stop: rows, not negative, counted from the sample's first; stop None: to the end. As with slices start may
        equal stop, for no row; but a stop past the sample's end is an error.
        layers: layer ids (not positions) and "final", in the order wanted, each once; None: all, in the file's order.
        wait_s: how long to wait for a sample that is still arriving or not known yet, 0 to 3600.
        verify: have the server check the rows against their hashes, for which it reads all layers of these rows. False: it
        reads fewer than half of the layers alone, unchecked, which saves the disk most of the work where layers are many.
        count: whether a read of every row is one that the rule delete_after_reads counts, once the last row is handed out.

        Raises SampleNotFound (the id did not appear within wait_s, nor within the server's own shorter grace for ids that
        nobody has opened), SampleFailed (its `reason` is the code of why), DeadlineExceeded (still arriving after wait_s),
        BadTokenRange, BadLayers, Damaged (the file fails its hashes), and UnsupportedFormat (the sample has columns without
        which its rows mean something else, and this version, or the server's, does not know them).
        """
        wait_s = float(wait_s)
        if not 0 <= wait_s <= READ_WAIT_S_MAX:
            raise BadParams(f"wait_s {wait_s:g} is not between 0 and {READ_WAIT_S_MAX:g} seconds")
        first, last = _checked_range(start, stop)
        request = samples_pb2.ReadRequest(
            namespace=check_namespace(namespace),
            sample_id=check_sample_id(sample_id),
            start=first,
            stop=last,
            wait_s=wait_s,
            unverified=not verify,
            in_place=self.data_dir is not None,
            all_in_place=self.data_dir is not None,
            columns=further_columns(),
            counting=samples_pb2.READ_COUNTING_CALLED if count else samples_pb2.READ_COUNTING_NOT,
        )
        request.layer_ids.extend(_checked_layers(self._with_ids(layers, request)))
        reader = self._reader(request)
        if self.data_dir is not None:
            try:
                reader.take_from(self.data_dir)
            except WrongFileError as error:
                if not self._said_not_in_place:
                    self._said_not_in_place = True
                    _log.warning("rows come from the server, not out of %s: %s", self.data_dir, error)
                request.in_place = False
                reader = self._reader(request)
        if count:
            reader.count_with(self._counter.add)
        return reader

    def get_many(
        self,
        samples: Iterable[str | SampleInfo] | None = None,
        *,
        namespace: str | None = None,
        model: str | None = None,
        tags: Mapping[str, str] | None = None,
        created_from: datetime.datetime | int | None = None,
        created_until: datetime.datetime | int | None = None,
        layers: Sequence[int | str] | None = None,
        wait_s: float = 0.0,
        verify: bool = True,
        retry_s: float = 60.0,
    ) -> Iterator[Answer]:
        """Many samples as one stream: an `Answer` each, in the order asked, one sample in memory at a time.

        samples: ids (in `namespace`, by default "default"), or what `list` returned; None: all committed samples that the
        filters choose, newest first, as in `list`. Filters go with None alone. layers, verify: as in `get`.
        wait_s: how long to wait for each sample that is not there yet. retry_s: how long a read that breaks is tried again: the
        server may restart meanwhile. It goes on at its next row, if the sample is still the one that was committed then.

        A bad sample is an answer, and the next one follows: SampleNotFound, SampleFailed, StillArriving, BadLayers, Damaged.
        Raises BadParams for ids with filters; ImportError where torch is missing; Unauthenticated, and ServerUnavailable and
        the like once `retry_s` are over.
        """
        require_torch()
        filters = (model, tags, created_from, created_until)
        if samples is not None and any(filters):
            raise BadParams("get_many takes samples, or filters that choose them, and not both")
        found: Iterable[str | SampleInfo] = (
            self.list(
                namespace=namespace,
                model=model,
                state=SampleState.COMMITTED,
                created_from=created_from,
                created_until=created_until,
                tags=tags,
                page_size=PAGE_SIZE_MAX,
            )
            if samples is None
            else samples
        )
        space = DEFAULT_NAMESPACE if namespace is None else check_namespace(namespace)
        reads = (self._read_of(space, one, layers, verify) for one in found)
        first_reads = READS_FIRST if samples is None else 1  # All that filters choose are many; an iterator may be left soon.
        answers = self.many(wait_s=wait_s, retry_s=retry_s, first_reads=first_reads).answers(reads, receive_sample)
        return (
            Answer(*name, None, answer) if isinstance(answer, SlotStreamError) else Answer(*name, answer, None)
            for name, answer in answers
        )

    def _read_of(
        self, namespace: str, sample: str | SampleInfo, layers: Sequence[int | str] | None, verify: bool
    ) -> tuple[tuple[str, str], samples_pb2.ReadRequest | Listed | SlotStreamError]:
        """A sample's name, and the read of it, or why there can be none."""
        info = sample if isinstance(sample, SampleInfo) else None
        name = (info.namespace, info.sample_id) if info else (namespace, str(sample))
        try:
            if layers is not None and FINAL in layers:
                info = info or self.stat(name[1], namespace=name[0])
                if info.state is SampleState.FAILED:
                    raise SampleFailed(f"sample {name[1]!r} failed: {info.error_message}", info.error_code or "")
                layers = _final_in(layers, info)
            read = samples_pb2.ReadRequest(
                namespace=name[0],
                sample_id=check_sample_id(name[1]),
                unverified=not verify,
                columns=further_columns(),
            )
            read.layer_ids.extend(_checked_layers(layers))
            return name, Listed(info, read) if info and info.state is SampleState.COMMITTED else read
        except (BadLayers, BadSampleId, SampleFailed, SampleNotFound) as error:
            return name, error

    def many(self, *, wait_s: float, retry_s: float, first_reads: int = 1) -> ManyReads:
        """Reads of many samples, as `get_many` and streams of rows do them. `first_reads`: see `ManyReads`."""
        if not 0 <= wait_s <= READ_WAIT_S_MAX or not 0 <= retry_s < math.inf:
            raise BadParams(f"wait_s is 0 to {READ_WAIT_S_MAX:g} seconds, and retry_s 0 or more")
        return ManyReads(
            self._rpc,
            stall_limit_s=self._stall_timeout_s,
            retry_s=retry_s,
            wait_s=wait_s,
            data_dir=self.data_dir,
            count=self._counter.add,
            first_reads=first_reads,
        )

    def _with_ids(self, layers: Sequence[int | str] | None, request: samples_pb2.ReadRequest) -> Sequence[int | str] | None:
        """`layers` with the id of "final" in its place, which only the sample knows. Raises BadLayers where it has none."""
        if not isinstance(layers, Sequence) or isinstance(layers, str) or FINAL not in layers:
            return layers
        asked = samples_pb2.ReadRequest()
        asked.CopyFrom(request)
        asked.start, asked.stop, asked.in_place = 0, 0, False  # No row: only what the sample is.
        asked.counting = samples_pb2.READ_COUNTING_NOT
        with self._reader(asked) as reader:
            info = reader.info
        return _final_in(layers, info)

    def _reader(self, request: samples_pb2.ReadRequest) -> RowReader:
        return RowReader(
            self._rpc.read(request),
            request,
            header_limit_s=request.wait_s + self._stall_timeout_s,
            stall_limit_s=self._stall_timeout_s,
        )

    def stat(self, sample_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> SampleInfo:
        """What is known about a sample in any state; never waits. Raises SampleNotFound."""
        request = samples_pb2.StatRequest(namespace=check_namespace(namespace), sample_id=check_sample_id(sample_id))
        return SampleInfo.from_wire(self._rpc.stat(request))

    def list(
        self,
        *,
        namespace: str | None = None,
        model: str | None = None,
        state: str | None = None,
        created_from: datetime.datetime | int | None = None,
        created_until: datetime.datetime | int | None = None,
        tags: Mapping[str, str] | None = None,
        request: str | None = None,
        limit: int | None = None,
        page_size: int = 200,
    ) -> Iterator[SampleInfo]:
        """Samples newest first, fetched a page at a time as the iterator advances. None: no such filter.

        state: a SampleState or its name. created_from (inclusive), created_until (exclusive): datetimes with a timezone, or
        nanoseconds since 1970 UTC. tags: at most 8, all of which must be equal. limit: the most samples to return.
        request: the id that vLLM answered a request with: its samples, whose ids are made of it. Where a sample has that very
        id, only that one. Raises ProtocolViolation where the server is too old for it.
        """
        if limit is not None and limit < 0:
            raise BadPage(f"limit {limit} is negative")
        asked = _list_request(namespace, model, state, created_from, created_until, tags, request, page_size)
        return self._pages(asked, page_size, limit)

    def page(
        self,
        page_token: str = "",
        *,
        namespace: str | None = None,
        model: str | None = None,
        state: str | None = None,
        created_from: datetime.datetime | int | None = None,
        created_until: datetime.datetime | int | None = None,
        tags: Mapping[str, str] | None = None,
        request: str | None = None,
        page_size: int = 100,
    ) -> Page:
        """One page of `list`, whose filters these are: for a caller that goes on later, where the token of the last page says.

        Raises BadPage for a token of another listing.
        """
        asked = _list_request(namespace, model, state, created_from, created_until, tags, request, page_size)
        asked.page_token = page_token
        reply = self._listed(asked)
        return Page(tuple(map(SampleInfo.from_wire, reply.samples)), reply.next_page_token)

    def moment(self, *, namespace: str | None = None) -> int:
        """Now, by the server's clock, in Unix ns: up to then nothing commits any more. An epoch of `rows` is counted by it.

        Waits for commits under way. A server of an earlier version does not say; then it is before all that is arriving.
        """
        request = samples_pb2.ListRequest(
            namespace="" if namespace is None else check_namespace(namespace), page_size=1, settle=True
        )
        reply = self._rpc.list(request)
        if reply.as_of_unix_ns:
            return reply.as_of_unix_ns
        arriving = (info.created_unix_ns - 1 for info in self.list(namespace=namespace, state="ARRIVING"))
        return min([*(info.created_unix_ns for info in reply.samples), *arriving], default=0)

    def delete(self, sample_id: str, *, namespace: str = DEFAULT_NAMESPACE, created_unix_ns: int | None = None) -> None:
        """Removes a committed or failed sample, file and catalogue row. Raises SampleNotFound, StillArriving, Leased.

        created_unix_ns: only the sample that was opened then, as `list` told; one that took its id meanwhile stays. A server of
        an earlier version does not look at it.
        """
        request = samples_pb2.DeleteRequest(
            namespace=check_namespace(namespace),
            sample_id=check_sample_id(sample_id),
            created_unix_ns=created_unix_ns or 0,
        )
        self._rpc.delete(request)

    def ack(self, sample_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        """Says that this reader is done with a committed sample. Raises SampleNotFound.

        Where the namespace's rule says delete_on_ack, the server deletes the sample as soon as nobody else reads it or holds
        a lease on it; elsewhere the ack is only noted. Acking twice is fine while the sample is there.
        """
        self._rpc.ack(samples_pb2.AckRequest(namespace=check_namespace(namespace), sample_id=check_sample_id(sample_id)))

    def lease(self, sample_id: str, seconds: float, *, namespace: str = DEFAULT_NAMESPACE, holder: str | None = None) -> int:
        """Keeps a committed sample from being deleted for so long from now, at most a day; when that ends, in Unix ns.

        A later call replaces this client's lease on it, and 0 seconds give it back (0 is returned). `holder`: in whose
        name, by default this client's own; with a fixed name a restarted reader replaces the lease of its past life.
        With the right `admin`, `holder=""` and 0 seconds end the leases of everybody on it. An open read needs no lease: it
        is never deleted under its reader. Raises SampleNotFound, BadParams and, where too many leases are held, StoreFull
        or TooMany.
        """
        if not 0 <= seconds <= LEASE_S_MAX:
            raise BadParams(f"a lease lasts 0 to {LEASE_S_MAX:g} seconds, not {seconds}")
        request = samples_pb2.LeaseRequest(
            namespace=check_namespace(namespace),
            sample_id=check_sample_id(sample_id),
            holder=self._holder() if holder is None else "" if not holder and not seconds else check_holder(holder),
            seconds=seconds,
        )
        return self._rpc.lease(request).leased_until_unix_ns

    def usage(self, *, namespace: str | None = None) -> Usage:
        """What the server holds, by namespace; of one namespace alone, only what is its."""
        request = samples_pb2.UsageRequest(namespace="" if namespace is None else check_namespace(namespace))
        first = reply = self._rpc.usage(request)
        spaces = [*reply.namespaces]
        while reply.next_page_token:
            request.page_token = reply.next_page_token
            reply = self._rpc.usage(request)
            spaces += reply.namespaces
        return Usage.from_wire(tuple(map(NamespaceUsage.from_wire, spaces)), first)

    def status(self) -> Status:
        """How the server is. With the right `admin` in every namespace also its engines, rates, failures and disk.

        Raises ProtocolViolation where the server is of an earlier version, which does not know the question.
        """
        try:
            return Status.from_wire(self._rpc.status())
        except NotServed as error:
            raise NotServed(f"the server at {self.address} is of an earlier version, which tells no status") from error

    def verify(
        self, sample_id: str | None = None, *, namespace: str | None = None, quarantine: bool = False
    ) -> Iterator[Verdict]:
        """Has the server check stored samples against their hashes; one verdict a sample, sound or damaged, as they come.

        quarantine: have it take damaged ones out of service too: they fail with DAMAGED, their files are moved aside.

        sample_id None: every committed sample, of every namespace if that is None too. An id without a namespace is one of
        the default namespace; SampleNotFound when it is not stored there.
        """
        if sample_id is not None and namespace is None:
            namespace = DEFAULT_NAMESPACE
        request = samples_pb2.VerifyRequest(
            namespace="" if namespace is None else check_namespace(namespace),
            sample_id="" if sample_id is None else check_sample_id(sample_id),
            quarantine=quarantine,
        )
        return self._verdicts(request)

    def restore(self, sample_id: str | None = None, *, namespace: str | None = None) -> Iterator[Restored]:
        """Has the server take files out of its quarantine that verify again; what became of each, as it comes.

        sample_id None: every file, of every namespace if that is None too. An id without a namespace is one of the default
        namespace; nothing comes where the quarantine has no such file.
        """
        if sample_id is not None and namespace is None:
            namespace = DEFAULT_NAMESPACE
        request = samples_pb2.RestoreRequest(
            namespace="" if namespace is None else check_namespace(namespace),
            sample_id="" if sample_id is None else check_sample_id(sample_id),
        )
        return self._restored(request)

    def retention(self, rules: str | None = None, *, namespace: str | None = None) -> Iterator[Forecast]:
        """What rules of retention would delete now, by namespace and key of the rules file. Deletes nothing.

        rules: the text of a rules file; None: the rules that the server runs with. Needs the right `admin`. Raises BadParams
        for rules that cannot work.
        """
        request = samples_pb2.RetentionRequest(namespace="" if namespace is None else check_namespace(namespace), rules=rules)
        return self._forecasts(request)

    def accept_retention(self, *, namespace: str | None = None) -> builtins.list[str]:
        """The server's rules may delete, also more than half of a namespace; in which they were held. Needs `admin`."""
        request = samples_pb2.RetentionRequest(namespace="" if namespace is None else check_namespace(namespace), accept=True)
        return [forecast.namespace for forecast in self._forecasts(request)]

    def _holder(self) -> str:
        return self._holders.setdefault(os.getpid(), f"client-{secrets.token_hex(8)}")

    def pause(self, seconds: float) -> None:
        """Sleeps for so long. Raises ValueError as soon as another thread closes the client."""
        self._rpc.pause(seconds)

    def close(self) -> None:
        """Ends the connection, calls still under way, and what other threads wait for in them. May be called twice.

        First the server is told of the reads so far, for two seconds at most.
        """
        self._counter.close()
        self._rpc.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a client cannot be pickled, for another process cannot use its connection: pass the address, and connect there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _pages(self, request: samples_pb2.ListRequest, page_size: int, limit: int | None) -> Iterator[SampleInfo]:
        left = limit
        while left is None or left > 0:
            request.page_size = page_size if left is None else min(page_size, left)
            reply = self._listed(request)
            yield from map(SampleInfo.from_wire, reply.samples[:left])
            if not reply.next_page_token:
                return
            request.page_token = reply.next_page_token
            left = None if left is None else left - len(reply.samples)

    def _listed(self, request: samples_pb2.ListRequest) -> samples_pb2.ListReply:
        reply = self._rpc.list(request)
        if request.request_id and not reply.of_request:
            raise NotServed(f"the server at {self.address} is of an earlier version, and finds no sample by its request")
        return reply

    def _verdicts(self, request: samples_pb2.VerifyRequest) -> Iterator[Verdict]:
        stream = self._rpc.verify(request)
        try:
            while (reply := stream.receive(_VERIFY_STALL_S)) is not None:
                yield Verdict.from_wire(reply)
        finally:
            stream.close()

    def _forecasts(self, request: samples_pb2.RetentionRequest) -> Iterator[Forecast]:
        stream = self._rpc.retention(request)
        try:
            while (reply := stream.receive(_VERIFY_STALL_S)) is not None:
                yield Forecast.from_wire(reply)
        finally:
            stream.close()

    def _restored(self, request: samples_pb2.RestoreRequest) -> Iterator[Restored]:
        stream = self._rpc.restore(request)
        try:
            while (reply := stream.receive(_VERIFY_STALL_S)) is not None:
                yield Restored.from_wire(reply)
        finally:
            stream.close()


def _list_request(
    namespace: str | None,
    model: str | None,
    state: str | None,
    created_from: datetime.datetime | int | None,
    created_until: datetime.datetime | int | None,
    tags: Mapping[str, str] | None,
    request: str | None,
    page_size: int,
) -> samples_pb2.ListRequest:
    if not 0 < page_size <= PAGE_SIZE_MAX:
        raise BadPage(f"page_size {page_size} is not between 1 and {PAGE_SIZE_MAX}")
    if tags and len(tags) > TAG_FILTERS_MAX:
        raise BadTags(f"a list filters by at most {TAG_FILTERS_MAX} tags, not {len(tags)}")
    return samples_pb2.ListRequest(
        namespace="" if namespace is None else check_namespace(namespace),
        model=model or "",
        state=wire_state(state),
        created_from_unix_ns=unix_ns(created_from),
        created_until_unix_ns=unix_ns(created_until),
        tags=check_tags(tags or {}),
        request_id=request or "",
        page_size=page_size,
    )


def _final_in(layers: Sequence[int | str], info: SampleInfo) -> builtins.list[int | str]:
    """`layers` with the id of "final" in its place. Raises BadLayers where the sample has none."""
    if info.layer_names[-1:] != (FINAL,):
        raise BadLayers(f"sample {info.sample_id!r} has no layer {FINAL!r}: its layers are {list(info.layer_ids)}")
    return [info.layer_ids[-1] if layer == FINAL else layer for layer in layers]


def _checked_range(start: int, stop: int | None) -> tuple[int, int | None]:
    try:
        first = operator.index(start)
        last = None if stop is None else operator.index(stop)
    except TypeError:
        raise BadTokenRange(f"rows [{start!r}, {stop!r}) are not integers") from None
    # The end that is left open is checked by the server, which knows it.
    if not 0 <= first <= (ROWS_MAX if last is None else last) <= ROWS_MAX:
        raise BadTokenRange(f"rows [{first}, {'end' if last is None else last}) are not a range of rows")
    return first, last


def _checked_layers(layers: Sequence[int | str] | None) -> builtins.list[int]:
    if layers is None:
        return []
    try:
        ids = [operator.index(layer) for layer in layers]  # type: ignore[arg-type]
    except TypeError:
        raise BadLayers(f"layers {layers!r} are not a sequence of layer ids") from None
    # On the wire no layer means every layer: an empty selection must not turn into all of them.
    if not 0 < len(ids) <= LAYERS_MAX:
        raise BadLayers(f"{len(ids)} layers are not between 1 and {LAYERS_MAX}; leave layers None for all")
    if len(set(ids)) != len(ids) or not all(0 <= layer < 1 << 32 for layer in ids):
        raise BadLayers(f"layers {ids} hold an id twice, or one that is not a layer id")
    return ids
