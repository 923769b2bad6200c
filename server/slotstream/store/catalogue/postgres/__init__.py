"""The catalogue in PostgreSQL: for any number of servers, each with this code and one thread that writes.

catalogue   the operations
database    connections, transactions, and what becomes of one whose end nobody saw
rows        the rows of one transaction: locked together, changed in memory, written together
attempts    objects that are on their way, and those that have to go
leases      who holds which sample until when
leading     which of the servers is the leader
notices     what happened to samples, told from server to server
listing     pages of a listing
questions   what changes nothing
watching    a limit on every wait
connecting  one connection, set up, and who may not be behind it
address     the URL, which is never shown whole
migrating   the tables, version by version; `migrations/` has them
failures    what an error of the database means
texts       text that the database cannot hold as it is
"""
