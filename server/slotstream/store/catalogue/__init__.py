"""The catalogue: what is stored, by name, state, tags and time.

base        the Protocol
queries     what it is asked, and what it answers
holds       who has a sample open
page_token  where a listing goes on
sqlite/     the one beside the files of one machine; nothing else imports sqlite3
"""
