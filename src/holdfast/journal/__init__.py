"""What must be remembered: facts, appended in order, durable by prefix, written by one driver at a time."""
