"""Everything that is put on decoder layers: replay, tiled units, fused chains, the head with its loss."""
