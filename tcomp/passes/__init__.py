"""Passes: functions from Graph to Graph, and the memory planner."""
