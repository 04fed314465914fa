"""Receives request state and continues it; alone it is the colocated mode."""
