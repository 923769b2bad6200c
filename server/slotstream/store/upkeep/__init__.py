"""What happens to stored samples later.

lifetimes   readers, acks, leases, deletions and the quarantine
retention   the rules, and what they decide
sweeping    carries them out
clock_watch whether the clock can be believed
deleting    how a sample goes
verifying   whether what is stored is what was committed
scrubbing   verifies everything, slowly
quarantine  where damaged files go
restoring   what verifies again comes back
"""
