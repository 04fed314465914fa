"""Compute ops: a torch reference (and later a Triton kernel) under one name. Knows no models."""
