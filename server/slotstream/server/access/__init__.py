"""Who may do what.

gate         every call passes it
limits       the table of what there may be in all, and of one peer
bodies       the messages of calls: how long, how late, how many at a time
shared_connections  whose are closed for calls that do not end
connections  keeps one address from having all of them
tokens       the tokens file
tls          the server's certificates
"""
