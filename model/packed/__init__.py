"""The model on weights and request state as they are stored, in place, by kernels."""
