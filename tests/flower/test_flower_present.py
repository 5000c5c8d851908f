"""Where Flower is required, its tests must not be skipped; where it is missing, what to do is said."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(not os.environ.get("FEDEVE_REQUIRE_FLOWER"), reason="FEDEVE_REQUIRE_FLOWER is not set")
def test_flower_is_there_where_it_is_required():
    assert importlib.util.find_spec("flwr") is not None
    assert importlib.util.find_spec("ray") is not None


def test_without_flower_the_error_says_what_to_install_and_the_rest_works():
    hide = "import sys; sys.modules['flwr'] = None; import fedeve; fedeve.FedEve()\n"
    hide += "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n: None if n == 'flwr' else find(n)\n"
    done = subprocess.run([sys.executable, "-c", hide + "import fedeve.flower"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Flower is not installed" in done.stderr and "pip install 'fedeve[flower]'" in done.stderr
