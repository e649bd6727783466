"""The per-node daemon that owns the memory of the tiers and keeps the books. It never imports ``compute`` or torch."""

__version__ = "0.1.0"
