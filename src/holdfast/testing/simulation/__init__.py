"""A world in one process and one thread, made from one seed: virtual time, links, stores and processes that fail."""
