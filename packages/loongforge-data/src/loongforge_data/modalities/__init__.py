"""Media other than video: pictures in tables, depth, sound, series at other rates, language."""
