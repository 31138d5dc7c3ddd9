"""The demo: semantic search with a real model that runs through kagent.

`files` finds the text, `passages` splits it, `encoder` turns passages into vectors, `comparison` measures
kagent against eager PyTorch, and `search` puts these together. The command itself is in `kagent_core.cli`.
"""
