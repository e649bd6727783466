"""Saved sessions: their files, and copies between host RAM and disk that never hold up the loop."""
