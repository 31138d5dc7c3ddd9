"""``kagent bench``: what kagent itself costs."""
