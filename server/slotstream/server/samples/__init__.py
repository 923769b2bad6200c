"""The Samples service: samples are read, listed, checked and deleted.

service  the calls of readers
admin    the calls that look at everything: usage, verify, restore
status   how the server is, and who is connected
calls    what all calls have: who is calling, their share, threads, a status
reads    the replies of a read, one at a time
leases   whose leases they are
convert  between the store's records and messages
"""
