"""The storage server: gRPC in front of the store. Imports neither torch nor vllm.

app            starts, drains and stops everything
config         what a server can be told
ingest/        samples come in
samples/       samples are read, listed, checked and deleted
access/        who may do what
nixl/          rows read over NIXL, by processes of their own
processes/     the processes of `--workers N`
housekeeping   what the server does of its own accord
pools          the threads that wait for the disk
waiters        who waits for which sample
metrics        the table of what is counted
"""
