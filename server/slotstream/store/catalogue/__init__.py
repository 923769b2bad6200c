"""The catalogue: a SQLite index of the sample files, which can be rebuilt from them.

catalogue      one thread writes, several read
sql            the tables and queries
retention_sql  those that retention needs
page_token     where a listing goes on
"""
