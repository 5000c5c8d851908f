"""Federated data: arrays with one index array per client, ways to partition them, and data sets, one file each."""
