"""From robot samples to model batches: images, text, states and actions."""
