"""The catalogue: what is stored, by name, state, tags and time.

queries     what it is asked, and what it answers
page_token  where a listing goes on
sqlite/     the one beside the files of one machine; nothing else imports sqlite3
"""
