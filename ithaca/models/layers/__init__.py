"""Changes to decoder layers: replay, tiled units, compiled code, the head with its loss."""
