"""Ways to ask about a symbol. `HELD_OUT` phrasings never occur in training; the evaluation uses them too."""

from __future__ import annotations

ASK: tuple[str, ...] = (
    "What does {n} do?", "What does {n} do?", "What is {n}?", "What is {n}?", "Explain {n}.",
    "Tell me about {n}.", "What is {n} for?", "What is {n} used for?", "Describe {n}.", "What's {n}?",
    "{n}?", "{n}", "Can you explain {n}?", "What does the {k} {n} do?", "What is the {k} {n}?",
    "Explain the {k} {n}.", "How does {n} work?", "When would I use {n}?",
    "Explain {n} in one sentence.", "What does {n} do in Python?", "What is {n} in Python?",
    "Explain what {n} does.", "Define {n}.", "Give me a short description of {n}.",
    "I saw {n} in some code. What is it?", "what does {n} do", "what is {n}", "explain {n}",
    "Document {n}.", "What is the purpose of {n}?", "Please explain {n}.", "Hi! What does {n} do?",
    "In Python, what does {n} do?", "What does `{n}` do?", "What is `{n}`?", "Explain `{n}`.",
    "Summarise {n}.", "Why is {n} useful?", "Could you tell me what {n} does?",
    "I want to know about {n}.", "What do I use {n} for?", "help({n})",
)  # fmt: skip
ASK_MODULE: tuple[str, ...] = (
    "What does the {n} module do?", "What is the {n} module?", "What is the {n} module for?",
    "Explain the {n} module.", "Tell me about the {n} module.", "What is the module {n} used for?",
    "What does {n} do?", "What is {n}?", "Why would I import {n}?",
)  # fmt: skip
ASK_IN: tuple[str, ...] = (
    "What does {s} from {m} do?", "What is {s} in the {m} module?", "What does {s} in {m} do?",
    "Explain {s} from the {m} module.",
)  # fmt: skip
REVERSE: tuple[str, ...] = (
    "Which {k} {d}?", "Which {k} in {m} {d}?", "What {k} in the {m} module {d}?",
    "Name the {k} that {d}.", "I need something in {m} that {d}.",
)  # fmt: skip
OPENERS: tuple[str, ...] = (
    "Hey,", "Hello.", "Quick one:", "I am learning Python.", "So,", "One more question:", "Sorry to ask,",
    "I have a question.", "Good morning.", "Next question:", "For my homework:", "I am a beginner.", "OK,",
    "Excuse me,", "I read about Python today.",
)  # fmt: skip
CLOSERS: tuple[str, ...] = (
    "Thanks!", "Please be brief.", "Keep it short.", "I never used it.", "Thank you.", "In simple words, please.",
    "I forgot.", "I want to use it.",
)  # fmt: skip
HELD_OUT: tuple[str, ...] = (
    "Please tell me what {n} does.", "Could you describe {n} for me?",
    "What would I use {n} for in Python?", "Hey, quick question: what does {n} do?",
    "I'm new to Python. What is {n}?", "Can you give me an explanation of {n}?",
    "Remind me what {n} does.", "What exactly does {n} do?",
)  # fmt: skip
SYSTEMS: tuple[str, ...] = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a friendly assistant",
    "You are a Python expert.", "Answer briefly.",
    "You are a helpful assistant that answers questions about Python.",
    "You are pico-instruct, a small assistant.", "Be concise.",
    "You are an expert programmer. Answer clearly.", "Respond in English.",
    "You help developers with the Python standard library.",
)  # fmt: skip
DONT_KNOW = "I don't know `{n}`. It is not in the part of Python's standard library that I was trained on."
