"""The storage server: gRPC in front of the store. Imports neither torch nor vllm.

app        starts, drains and stops everything            config, serve_arguments  what `slotstream serve` can be told
ingest     the stream that samples arrive on              lane      one sample's disk work, in order, off the event loop
serving    reads, listings, deletions, checks             arrivals  who waits for which sample
metrics    the table of what is counted                   malloc    settings that make frames cheap
"""
