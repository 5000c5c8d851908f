"""Modules that need what this machine may lack are not searched for examples."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["src/fedeve/flower/*"]
