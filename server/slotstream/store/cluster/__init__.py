"""Samples as objects that several servers share, with a catalogue in PostgreSQL: the one folder that knows which pair that is.

opening     how a server opens both, and what it checks first
store       the whole store, as one server has it
uploads     a sample that arrives: its rows land in a scratch file, and go on to its object
publishing  the step that commits it
lifetimes   deletions and damage
reading     objects, read as files are
generation  whether the catalogue is older than the bucket, and nothing may be deleted
rebuilding  the catalogue, brought up to what the bucket holds
failure_shares  how many failed samples a peer may leave, over all servers
copying     samples of a data directory, copied here
keeping     attempts are renewed, and those that ended are swept
"""
