"""The storage server: gRPC in front of the store. Imports neither torch nor vllm.

app            starts, drains and stops everything
ingest/        samples come in
samples/       samples are read, listed, checked and deleted
access/        who may do what
nixl/          rows read over NIXL, by processes of their own
processes/     the processes of `--workers N`
housekeeping   what the server does by itself
health/        who asks whether the server is well: gRPC's health service, and the probes of a pod
overview/      what `slotstream status` shows: engines, and the last hour's counts

In front of all of these:
config         what a server can be told
listening      the gRPC server and its port
shared_store   the store of `--store`, whose packages not everybody has
parts          what the services of one process share
waiters        who waits for which sample
disk_threads   the threads that wait for the disk
lines          whose turn it is
malloc         glibc's settings, and what a load has left given back
http           plain HTTP: /metrics, /livez and /readyz
metrics        the table of what is counted
status         how a failure travels over gRPC
pulse          whether the event loop and the threads still move
logs, version
"""
