"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# Machines are shared: time is no property. The same examples each time: a red run can be run again.
settings.register_profile("tandem", deadline=None, derandomize=True)
settings.load_profile("tandem")
