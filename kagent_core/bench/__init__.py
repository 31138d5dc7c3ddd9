"""``kagent bench``: what kagent itself costs, and how fast its fused kernels are."""
