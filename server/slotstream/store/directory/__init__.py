"""One directory on one machine: files, and the catalogue in SQLite beside them. No other part of the store knows both.

recovery     opens it: what a start does about what the last server left
comparing    which directories hold other files than the catalogue says
looking      checks it without a server
forecasting  what rules would delete of it, without a server
"""
