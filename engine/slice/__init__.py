"""Four layers of the real model's shape, to measure and to check the engine on one device."""
