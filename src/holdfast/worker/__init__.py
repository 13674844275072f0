"""Inside a worker process: how it comes to be, what it says to its agent, how it ends. Imports no storage."""
