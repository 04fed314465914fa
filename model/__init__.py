"""DeepSeek-V4.1: its layers, weights and the one declared list of request state."""
