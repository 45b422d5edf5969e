"""Schedulers and the engines they drive."""
