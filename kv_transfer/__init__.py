"""Request state in memory and its movement between ranks. Knows not what a field means."""
