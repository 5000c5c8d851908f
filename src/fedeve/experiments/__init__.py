"""Experiments: runs from configuration files, the demo, and pages that show results."""
