"""The Ingest service: samples come in.

service        all streams of a server: admitted, drained, ended
stream         one peer's call, from Hello to its end
open_samples   the samples that a stream has open, between the peer and their writers
sample_writer  one sample's disk work, in order
puller         how the server gets rows that are only announced: the seam of a data plane beside frames
announced      chunks that are announced and not here yet, and what waits for them
acks, replies  what the peer is told
requests       what a peer asks, in the store's terms
shared         what all streams use together
"""
