"""Simulation of caches and of the service, with the classes that production runs."""
