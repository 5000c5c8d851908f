"""Modules that need what this machine may lack, and files like this one, are not searched for examples."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = ["tests/**/conftest.py"]  # of one name in several folders, which pytest would trip over
if importlib.util.find_spec("flwr") is None:
    collect_ignore_glob += ["src/fedeve/flower/*"]
