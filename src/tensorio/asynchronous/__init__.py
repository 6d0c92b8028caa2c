"""Saving while training goes on: a snapshot in memory, written by a thread or a process of its own."""
