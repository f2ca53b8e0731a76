"""Parsing of request bodies that does not hold up the event loop: small ones at once, large ones in a process beside.

JSON decoding holds Python's lock for as long as it takes, seconds for the largest bodies, so a thread would not help.
"""
