"""Sinks: the only code that formats, counts or logs events."""

from __future__ import annotations

from rollout_spec.sinks.jsonl import JsonlSink
from rollout_spec.sinks.log import LoggedEvent, read_events, read_log
from rollout_spec.sinks.memory import MemorySink
from rollout_spec.sinks.tee import TeeSink

__all__ = ["JsonlSink", "LoggedEvent", "MemorySink", "TeeSink", "read_events", "read_log"]
