//! LoongForge ring core.
