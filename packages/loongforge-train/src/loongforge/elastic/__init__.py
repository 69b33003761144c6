"""A run that outlives its ranks: what is kept when some go or come, and who goes on with it."""
