"""The catalogue: a SQLite index of the sample files, which can be rebuilt from them.

catalogue      one thread writes, several read
opening        opens it, as closely looked at as it must be
damage         what can be wrong with it
sql            the tables and queries
row_sums       a checksum a row
schema         the versions of the tables
seal           what the directory says of its catalogue
checking       whether a catalogue is sound
salvage        what can be saved out of one that is not
retention_sql  those that retention needs
page_token     where a listing goes on
"""
