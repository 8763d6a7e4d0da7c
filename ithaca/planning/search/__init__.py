"""The choice of mesh and memory plan, the longest row, and advice when nothing fits."""
