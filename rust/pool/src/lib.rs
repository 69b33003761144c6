//! LoongForge pool core.
