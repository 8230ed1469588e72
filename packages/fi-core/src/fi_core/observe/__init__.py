"""Watching calls from outside: the API log, dumps and their replay, trace definitions."""
