"""LoongForge."""
