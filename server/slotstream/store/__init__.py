"""The store: one safetensors file a sample, and a SQLite catalogue that indexes them. Imports neither grpc nor torch.

samples         SampleStore: opens the directory, hands out uploads and readers, deletes
publishing      the step that makes a sample a committed one
parts           what these and upkeep share: directory, disk, catalogue, clock, the locks of ids
failure_shares  how many failed samples a peer may leave behind
records         what is known of a sample: frozen data, free of disk and database
sample/         one sample's file: written, hashed, read
catalogue/      the index of all files, its tables and its queries
blobs/          whole samples as objects, in a bucket
upkeep/         what happens to stored samples later: retention, deletion, checks, quarantine
directory/      files with SQLite: how one directory is opened, recovered and looked at without a server
cluster/        a bucket with PostgreSQL: the store of one server of several
disk/           the few disk operations that everything above goes through, and the clock
"""
