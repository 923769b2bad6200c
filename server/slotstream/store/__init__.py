"""The store: one safetensors file a sample, and a SQLite catalogue that indexes them. Imports neither grpc nor torch.

samples     SampleStore: opens the directory, hands out uploads and readers, deletes
upload      one sample being written, from its reserved header to its rename
reading     one committed sample being read, checked against its hashes
verifying   checks of single samples and of whole directories, with or without a server
catalogue   the index (catalogue_sql, retention_sql: its tables and queries)
keeping     what stays and what goes: readers, leases, acks, deletions (deleting), damage (quarantine)
retention   the rules by which samples go, and pure decisions; sweeping carries them out
scrubbing   reads everything again and again, slowly
directory   whether the directory at the path is still the one that was opened
clock       the wall clock, but never backwards
recovery    what opening a directory does about what a crash left there
files       the few disk operations everything above goes through
"""
