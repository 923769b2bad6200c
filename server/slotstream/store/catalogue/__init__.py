"""The catalogue: what is stored, by name, state, tags and time.

base        the Protocol
attempts    what it is asked beside, where samples are objects
queries     what it is asked, and what it answers
holds       who has a sample open
page_token  where a listing goes on
row_values  a record as the columns of its row, and their checksum
of_request  which samples are of a request
batches     one thread that writes
sqlite/     the one beside the files of one machine; nothing else imports sqlite3
"""
