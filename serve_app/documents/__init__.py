"""Documents of clients as Markdown, converted in a process of their own."""
