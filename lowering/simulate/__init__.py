"""Runs plans on a described machine instead of a real one: an executor whose clock is simulated."""
