"""Where workers run: agents on nodes, reached by messages."""
