"""What all tests share."""

from __future__ import annotations

from tests.seeding import random_numbers_of_its_own

__all__ = ["random_numbers_of_its_own"]
