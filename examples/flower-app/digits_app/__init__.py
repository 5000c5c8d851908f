"""Handwritten digits on unequal clients, with Flower and fedeve."""
