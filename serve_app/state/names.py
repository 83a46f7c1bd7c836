"""Files of the state directory."""

# The store, where no other database is named.
FILE = "state.sqlite3"
# What versions before the store kept; read once.
OLD_ACCOUNTS = "accounts.yaml"
OLD_RESPONSES = "responses.sqlite3"
OLD_TRACES = "paths.sqlite3"
OLD_RATES = "rates.sqlite3"
OLD_FILES = (OLD_ACCOUNTS, OLD_RESPONSES, OLD_TRACES, OLD_RATES)
