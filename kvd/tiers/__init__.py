"""The tiers of memory: host RAM, VRAM, and the drivers that VRAM comes from."""
