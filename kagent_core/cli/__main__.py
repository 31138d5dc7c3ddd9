"""``python -m kagent_core.cli`` is the command ``kagent``."""

from kagent_core.cli import main

if __name__ == "__main__":
    main()
