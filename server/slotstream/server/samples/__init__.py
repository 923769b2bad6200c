"""The Samples service: samples are read, listed, checked and deleted.

service  the calls
reads    the replies of a read, one at a time
leases   whose leases they are
convert  between the store's records and messages
"""
