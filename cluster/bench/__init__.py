"""Measures a server as its clients see it: `tandem bench`, and what HTTP itself costs."""
