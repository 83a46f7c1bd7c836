"""Every message that crosses a process, declared once, with a version."""
