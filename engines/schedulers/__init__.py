"""Scheduling policies as pure decisions: no torch, no clock, no files, no randomness."""
