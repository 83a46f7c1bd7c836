"""Whisper: windows of sound to text, and how windows become one transcript."""
