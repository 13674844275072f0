"""Deciding and doing: pure machines decide, one event loop acts, facts are remembered in between."""
