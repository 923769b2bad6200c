"""Who may do what.

gate    every call passes it; everybody's share of what is limited
tokens  the tokens file
tls     the server's certificates
"""
