"""The page at /dashboard: its files, and signing in to it. All that it shows comes by ordinary routes of the API."""
