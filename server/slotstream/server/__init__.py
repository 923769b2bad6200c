"""The storage server: gRPC in front of the store. Imports neither torch nor vllm.

app            starts, drains and stops everything
ingest/        samples come in
samples/       samples are read, listed, checked and deleted
access/        who may do what
nixl/          rows read over NIXL, by processes of their own
processes/     the processes of `--workers N`
housekeeping   what the server does of its own accord
healthcheck    the standard health service

In front of all of these:
config         what a server can be told
listening      the gRPC server and its port
waiters        who waits for which sample
pools, lines   the threads that wait for the disk, and whose turn it is
idle_memory    what a load has left is given back
metrics        the table of what is counted
status         how a failure travels over gRPC
logs, malloc, version
"""
