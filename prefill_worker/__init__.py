"""Runs prompts, samples the first token, pushes request state as it is made."""
