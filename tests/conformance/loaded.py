"""The suite, made when this module is imported: by the server process that `pool` forks its workers from."""

from __future__ import annotations

from .suite import Suite

SUITE = Suite()
