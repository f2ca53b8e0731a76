"""Chats of very many values, in a process beside: decoding them, rendering them in one go and giving back what they
took hold Python's lock for up to seconds, so that a thread would not help."""
