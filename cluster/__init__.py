"""The control plane: the language that processes speak, and who talks to whom."""
