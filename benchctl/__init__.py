"""Replay request traces through LLM schedulers on a real engine and record every decision."""

__version__ = "0.1.0"
