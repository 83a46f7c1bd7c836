"""Which workers a request goes to, and when: pure policy. No clock, no network, no Ray; time is an argument."""
