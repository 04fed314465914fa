"""Ops that join others in one pass over memory: these are their specification."""
