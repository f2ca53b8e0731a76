"""Thirty prompts that differ in all that matters to batching: length, language, and how tokens repeat."""

from __future__ import annotations

CHATS = (
    "What is the capital of France?",
    "Explain gravity to a child in two sentences.",
    "Write a haiku about autumn rain.",
    "List three uses of a paper clip.",
    "Who wrote Romeo and Juliet, and when?",
    "Translate 'good morning' into Spanish, German and Italian.",
    "Give me a recipe for pancakes.",
    "Is 97 a prime number? Why?",
)
TEXTS = (
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "for (int i = 0; i < 10; i++) {\n    printf(",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "import numpy as np\n\n\ndef softmax(x):\n",
    '{"name": "Ada", "born": 1815, "works": [',
    "fn main() {\n    let numbers = vec![1, 2, 3];\n",
    "你好,请介绍一下北京的历史。",
    "日本の首都は東京です。東京は",
    "대한민국의 수도는 서울이며,",
    "人工智能的未来在于",
    "吾輩は猫である。名前はまだ",
    "I love 🍕 and 🍣, but my favourite food is",
    "🎉🎉🎉 Happy birthday! 🎂",
    "👩‍👩‍👧‍👦 is a family emoji, and 🏳️‍🌈 is",
    "Once upon a time, in a land far away,",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "1, 1, 2, 3, 5, 8, 13,",
    "Übermäßig viele Äpfel für den Bäcker: naïve façade, señor,",
    "    \n\n\t  indented",
    "A very short history of the twentieth century. In 1914 a war began that nobody had planned for.",
)
PARAGRAPH = (
    "The lighthouse keeper climbed the {n} steps each evening, counted the ships on the horizon, and wrote "
    "their names into a book bound in blue cloth. On day {n} the sea was {mood}, and the lamp burned until dawn. "
)
MOODS = ("calm", "grey", "restless", "bright as glass", "hidden by fog")


def long_text() -> str:
    """Well over 3,000 tokens of prose."""
    return "".join(PARAGRAPH.format(n=n, mood=MOODS[n % len(MOODS)]) for n in range(1, 80))
