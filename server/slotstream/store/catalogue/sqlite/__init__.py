"""The catalogue in SQLite: an index of the sample files beside it, which can be rebuilt from them.

catalogue      the operations
database       one thread writes, several read; what is damaged is mended
read_only      for who may not write, beside a running server too
opening        opens it, as closely looked at as it must be
damage         what can be wrong with it
sql            the tables and queries
retention_sql  those that retention needs
row_sums       a checksum a row
schema         the versions of the tables
seal           what the directory says of its catalogue
checking       whether a catalogue is sound
salvage        what can be saved out of one that is not
log_end        whether SQLite took all of its log
"""
