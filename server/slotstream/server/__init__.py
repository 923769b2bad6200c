"""The storage server: gRPC in front of the store. Imports neither torch nor vllm.

app        starts, drains and stops everything            config, serve_arguments  what `slotstream serve` can be told
ingest     all streams that samples arrive on             lane      one sample's disk work, in order, off the event loop
ingest_stream  one of them: what its peer says, is told, and is held to
serving    reads, listings, deletions, checks             arrivals  who waits for which sample
metrics    the table of what is counted                   malloc    settings that make frames cheap
"""
