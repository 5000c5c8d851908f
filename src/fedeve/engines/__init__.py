"""Engines turn runs into turns, one per round. They never see a method's state, only what it sends and a summary."""
