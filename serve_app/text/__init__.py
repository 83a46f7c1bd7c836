"""From messages to token ids and back: templates, tokenising, detokenising, stop strings, tool calls. No
torch, no Ray."""
