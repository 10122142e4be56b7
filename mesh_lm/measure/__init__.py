"""Speeds of links and matmuls, measured on the devices that are here."""
