"""``kagent bench models``: whole models through kagent, next to eager PyTorch, its compiler and inference engines."""
